"""`hadagen tune --fleet` on a real Dask cluster, whose GPUs are those of the emulator, and who can reach a fleet."""

import json
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing
from datetime import datetime, timedelta, timezone
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import dask
import psutil
import pytest
from click.testing import CliRunner
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from distributed import Client, LocalCluster, Worker
from fleet_cluster import Cluster, end
from test_runners import FakeService

from hadagen.cli.main import main
from hadagen.errors import DeviceError
from hadagen.fleet.client import Fleet
from hadagen.fleet.local import local_cluster
from hadagen.measure.worker import Worker as Measuring
from hadagen.tuning_db.store import Store

# ---- a tune ----------------------------------------------------------------------------------------------------------
TUNE = ("--problem", "n64-float16-fast", "--no-refine", "--from-scratch", "--json")


def test_a_fleet_of_two_classes_finds_winners_for_each_whatever_a_worker_does(cluster: Cluster, tmp_path: Path) -> None:
    cluster.add("Emulated A")
    cluster.add("Emulated B", EMULATED_DRIVER="590.2")
    cluster.add("Emulated B", EMULATED_FAULT="garbage")
    cluster.add("Emulated A", EMULATED_CODE="of another version")
    cluster.wait_for(4)
    database = tmp_path / "trials.db"
    result = CliRunner().invoke(
        main, ["tune", "--fleet", cluster.address, "--db", str(database), "--trials", "4", *TUNE]
    )
    assert result.exit_code == 0, result.output
    classes = json.loads(result.stdout)["classes"]
    assert [(each["gpu"], each["trials"]) for each in classes] == [("Emulated A", 4), ("Emulated B", 4)]
    assert all(each["winners"] for each in classes)
    assert "it has another hadagen; install the same version there" in result.stderr
    with Store.open(database) as store:
        tried = Counter((trial.environment.gpu, str(trial.knobs)) for trial in store.trials(blobs=False))
    assert (len(tried), set(tried.values())) == (8, {1})


def test_without_a_scheduler_or_a_gpu_there_is_a_sentence(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.add("")
    cluster.wait_for(1)
    database = str(tmp_path / "trials.db")
    run = CliRunner().invoke(main, ["tune", "--fleet", cluster.address, "--db", database, *TUNE])
    assert run.exit_code == 1
    assert f"no worker of the fleet at {cluster.address} has a GPU; start `dask worker" in run.stderr
    end(cluster.scheduler)
    monkeypatch.setattr("hadagen.fleet.client.CONNECT_SECONDS", 0.5)
    run = CliRunner().invoke(main, ["tune", "--fleet", cluster.address, "--db", database, *TUNE])
    assert run.exit_code == 1
    assert f"there is no Dask scheduler at {cluster.address}" in run.stderr
    assert "start one with `dask scheduler`" in run.stderr
    run = CliRunner().invoke(main, ["tune", "--fleet", "local", "--device", "0", "--db", database, *TUNE])
    assert "--device picks one GPU for a search without a fleet; leave out --device or --fleet" in run.stderr


# ---- who can reach a fleet -------------------------------------------------------------------------------------------
CONFIG = """
distributed:
  comm:
    require-encryption: true
    tls:
      ca-file: {0}
      scheduler: {{cert: {0}}}
      worker: {{cert: {0}}}
      client: {{cert: {0}}}
"""


# ---- a local fleet ---------------------------------------------------------------------------------------------------
def measure(dask_worker: Worker) -> None:
    """Start a measuring process that ends with the worker."""
    dask_worker.measuring = Measuring(FakeService, (0,))  # type: ignore[attr-defined]
    dask_worker.measuring.start()  # type: ignore[attr-defined]


def listening(process: psutil.Process) -> set[Any]:
    return {each.laddr for each in process.net_connections("inet") if each.status == psutil.CONN_LISTEN}


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with one GPU."""
    monkeypatch.setattr("hadagen.fleet.local._gpus", lambda: ["0"])


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lists the sockets of other processes to everybody")
def test_every_process_of_a_local_fleet_listens_on_loopback_alone(
    alone: None, capfd: pytest.CaptureFixture[str]
) -> None:
    """And says nothing on the terminal, neither while it starts nor at its end."""
    here = psutil.Process()
    others, sockets = set(here.children(recursive=True)), listening(here)
    with local_cluster() as address, Client(address, set_as_default=False) as client:  # type: ignore[no-untyped-call]
        client.wait_for_workers(2, timeout=60)
        client.run(measure)
        fleet = [each for each in here.children(recursive=True) if each not in others]
        names = [" ".join(each.cmdline()) for each in fleet]
        for program in ("spawn_main", "hadagen.measure.worker"):
            assert sum(program in name for name in names) == 2, names
        found = [*(listening(here) - sockets), *(each for process in fleet for each in listening(process))]
    assert len(found) >= 8, "of the scheduler with its dashboard, two nannies, and two workers with an HTTP server each"
    assert all(ip_address(each.ip).is_loopback for each in found), found
    assert capfd.readouterr().err == ""


# ---- TLS -------------------------------------------------------------------------------------------------------------
def certificate(path: Path) -> Path:
    """A file with a key and its self-signed certificate."""
    key = ec.generate_private_key(ec.SECP256R1())
    name, now = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, path.stem)]), datetime.now(timezone.utc)
    made = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    made = made.not_valid_before(now - timedelta(days=1)).not_valid_after(now + timedelta(days=1))
    made = made.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    path.write_bytes(
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        + made.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM)
    )
    return path


def configured(path: Path) -> dask.config.set:
    """Dask's configuration, with one certificate for all roles."""
    file = path.with_suffix(".yaml")
    file.write_text(CONFIG.format(path))
    return dask.config.set(dask.config.merge(dask.config.config, dask.config.collect([str(file)], env={})))


@pytest.fixture
def secured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """A cluster with TLS and one worker. Its certificate is fleet.pem."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setattr("hadagen.fleet.client.CONNECT_SECONDS", 5.0)
    monkeypatch.setenv("DASK_CONFIG", str(tmp_path / "fleet.yaml"))  # of scheduler and worker
    with ExitStack() as until_the_end:
        with configured(certificate(tmp_path / "fleet.pem")):
            made = until_the_end.enter_context(closing(Cluster(tmp_path)))
            made.add("Emulated A")
            made.wait_for(1)
        yield made


def refusal(address: str) -> str:
    with pytest.raises(DeviceError) as caught:
        Fleet(address, "nvrtc").__enter__()
    (sentence,) = str(caught.value).splitlines()
    return sentence


def test_only_a_client_with_the_certificate_of_the_fleet_reaches_it(secured: Cluster, tmp_path: Path) -> None:
    assert secured.address.startswith("tls://")
    tune = ["tune", "--fleet", secured.address, "--db", str(tmp_path / "trials.db"), "--trials", "1", "--no-refine"]
    tune += ["--problem", "n64-float16-fast", "--from-scratch"]
    with configured(tmp_path / "fleet.pem"):
        run = CliRunner().invoke(main, tune)
        assert run.exit_code == 0, run.output
        assert "warning" not in run.stderr
        plain = refusal(secured.address.replace("tls", "tcp"))
    fix = "name the fleet's ca-file and certificates in Dask's configuration, under distributed.comm.tls"
    without = CliRunner().invoke(main, tune)
    assert without.exit_code == 1
    assert without.stderr.splitlines() == [
        f"hadagen: the Dask scheduler at {secured.address} needs TLS, and Dask's configuration names no certificate of "
        f"a client; {fix}"
    ]
    with configured(certificate(tmp_path / "other.pem")):
        foreign = refusal(secured.address)
    for sentence in (foreign, plain, refusal(secured.address.replace("tls", "tcp"))):
        assert "there is no connection to the Dask scheduler at" in sentence
        assert sentence.endswith(fix)
    with configured(tmp_path / "lost.pem"):
        assert f"names certificates that cannot be used ({tmp_path / 'lost.pem'}" in refusal(secured.address)


def test_an_address_of_another_protocol_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with closing(Cluster(tmp_path)) as plain, configured(certificate(tmp_path / "fleet.pem")):
        for address in (plain.address.replace("tcp", "tls"), plain.address, plain.address.replace("tcp", "carrier")):
            assert "give its address with tcp:// or tls://" in refusal(address)


@pytest.mark.parametrize("place", ["tls:/me:s3cret@host:8786", "tls://me:s3cret@host:8786", "postgresql:me:s3cret"])
def test_what_is_no_address_is_refused_without_showing_it(place: str) -> None:
    tuned = CliRunner().invoke(main, ["tune", "--fleet", place, "--n", "64"])
    assert tuned.exit_code == 2
    assert tuned.stderr.startswith(
        "hadagen: --fleet names no address of a Dask scheduler; give an address like tls://HOST:8786"
    )
    assert "s3cret" not in tuned.output


def test_a_local_fleet_has_tls_where_dask_requires_it(alone: None, tmp_path: Path) -> None:
    with configured(certificate(tmp_path / "fleet.pem")):
        with local_cluster() as address:
            assert address.startswith("tls://127.0.0.1:")
            with Fleet(address, "nvrtc") as fleet:
                assert fleet.state.workers == 2
        (tmp_path / "fleet.pem").write_text("no certificate")
        with pytest.raises(DeviceError, match=r"names certificates that cannot be used \(.*fleet.pem"), local_cluster():
            pass


@pytest.mark.parametrize(
    ("address", "warns"),
    [
        ("tcp://10.1.2.3:8786", True),
        ("tcp://[2001:db8::1]:8786", True),
        ("tcp://[fe80::1%eth0]:8786", True),
        ("ws://10.1.2.3:8786", True),
        ("tcp://node7.invalid:8786", True),
        ("tcp://127.0.0.1:8786", False),
        ("tcp://127.8.0.1:8786", False),
        ("tcp://[::1]:8786", False),
        ("tcp://localhost:8786", False),
        ("tls://10.1.2.3:8786", False),
        ("inproc://10.1.2.3/1/2", False),
    ],
)
def test_a_scheduler_beyond_loopback_without_tls_brings_a_warning(
    address: str, warns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distributed.comm.tcp.TCP.peer_address", address)
    monkeypatch.setattr("distributed.comm.inproc.InProc.peer_address", address)
    options = {"processes": False, "n_workers": 0, "dashboard_address": None}
    with LocalCluster(**options) as cluster, warnings.catch_warnings(record=True) as caught:  # type: ignore[no-untyped-call]
        warnings.simplefilter("always")
        with Fleet(cluster.scheduler_address, "nvrtc"):
            pass
    said = [str(each.message) for each in caught if "TLS" in str(each.message)]
    assert len(said) == warns
    for sentence in said:
        assert "can run programs there" in sentence
        assert "start them with TLS, give its tls:// address, and name the fleet's" in sentence
