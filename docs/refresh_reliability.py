"""The tables of reliability.md: what is promised, the tests that fail when a promise is broken, and measured figures.

To add a promise, add a `Promise` to its area in `PROMISES`. A test checks that every test that is named here exists.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import refresh_files as files
from refresh_fleet import kills as fleet_kills
from refresh_fleet import search_in_parallel, speed
from refresh_markdown import grid

NEAR = 1.02  # times that differ by no more are as good
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")


@dataclass(frozen=True)
class Promise:
    """`tests`: as pytest names them. `figure`: what was measured of it, "" where there is no data yet."""

    text: str
    tests: Sequence[str]
    figure: Callable[[], str] = lambda: ""


def _rows(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def kills() -> str:
    found = files.read_json(files.KILLS)
    if not found:
        return ""
    count = found["tune"] + found["worker"] + found["compiler"]
    return (
        f"{count} kills ({found['tune']} of the tune, {found['worker']} of its measuring process, {found['compiler']} "
        f"of compilers): {found['databases']} of {found['databases']} databases equal, of {found['trials']} trials each"
    )


def faults() -> str:
    found = files.read_json(files.FAULTS)
    if not found:
        return ""
    kinds = {fault["fault"] for fault in found["faults"]}
    return (
        f"{found['gpu']}: {len(found['faults'])} broken kernels of {len(kinds)} kinds; {found['same_winners']} of "
        f"{found['cells']} winners the same"
    )


def hangs() -> str:
    found = files.read_json(files.FAULTS)
    lost = [fault["lost_s"] for fault in found["faults"] if fault["outcome"] == "timeout"] if found else []
    return f"{found['gpu']}: {max(lost):.1f} s at most, of {len(lost)}" if lost else ""


def laws() -> str:
    found = files.read_json(files.LAWS)
    if not found:
        return ""
    return (
        f"{found['gpu']}: {found['kernels']} kernels of {found['problems']} problems; {len(found['broken'])} break a "
        "law"
    )


def sanitizer() -> str:
    rows = [row for row in _rows(files.SANITIZER) if row["problem"] != "control" and row["launches"] not in ("", "0")]
    if not rows:
        return ""
    found = ", ".join(
        f"{tool} {sum(int(row[tool] or 0) for row in rows)} ({sum(row[tool] != '' for row in rows)} kernels)"
        for tool in TOOLS
    )
    apart = {
        "own_barrier": "with warnings of a barrier that one thread prepares",
        "lanes": "with findings of racecheck only where one lane arrives for its warp",
    }
    counts = {name: sum(row[name] not in ("", "0") for row in rows) for name in apart}
    warned = "".join(f"; {counts[name]} kernels {what}" for name, what in apart.items() if counts[name])
    problems = len({row["problem"] for row in rows})
    gpus = ", ".join(sorted({row["gpu"] for row in rows}))
    return f"{gpus}: {len(rows)} kernels of {problems} problems; findings: {found}{warned}"


def tunes() -> str:
    rows = _rows(files.TUNES)
    if not rows:
        return ""
    near = sum(max(us) <= NEAR * min(us) for us in ((float(row["us_a"]), float(row["us_b"])) for row in rows))
    problems = len({row["problem"] for row in rows})
    return f"{rows[0]['gpu']}: {near / len(rows):.1%} of {len(rows)} cells, of {problems} problems"


def bundle_damage() -> str:
    rows = _rows(files.BUNDLE_DAMAGE)
    if not rows:
        return ""
    count, refused, before, other, signed_refused, signed_before = (
        sum(int(row[name]) for row in rows)
        for name in ("cases", "refused", "as before", "other", "signed: refused", "signed: as before")
    )
    slowest, memory = (max(int(row[name]) for row in rows) for name in ("slowest ms", "memory MB"))
    return (
        f"{count} cases: {refused} refused, {before} as before, {other} hold something else with digests made anew; "
        f"where a signature is asked for, {signed_refused} and {signed_before}, and no other; at most {slowest} ms and "
        f"{memory} MB"
    )


PROMISES: Mapping[str, Sequence[Promise]] = {
    "tuning": (
        Promise(
            "If a tune or one of its helpers is killed at any moment, the same command continues the tune. Its "
            "database ends up equal to the database of an undisturbed run.",
            (
                "test_kills.py::test_a_tune_that_is_killed_at_random_moments_ends_like_one_that_was_not",
                "test_resume.py::test_a_killed_search_ends_like_one_that_was_not",
            ),
            kills,
        ),
        Promise(
            "A kernel that writes out of bounds, hangs, deadlocks, gives garbage or breaks the context ends as an "
            "outcome of its trial. The winners are the same as in a tune without the kernel.",
            (
                "test_gpu_faults.py::test_a_tune_survives_every_broken_kernel",
                "test_kills.py::test_broken_kernels_end_as_what_they_are_and_spoil_nothing_else",
                "test_runners.py::test_a_run_survives_every_failure",
            ),
            faults,
        ),
        Promise(
            "A kernel that hangs costs at most 10 s. A slow kernel is not taken for one that hangs.",
            (
                "test_gpu_faults.py::test_a_tune_survives_every_broken_kernel",
                "test_runners.py::test_a_hang_costs_as_long_as_a_device_may_be_silent_and_slow_kernels_are_not_taken"
                "_for_one",
            ),
            hangs,
        ),
        Promise(
            "A compiler or a measuring process that is killed, or finds no room, does not count against a variant: the "
            "variant is tried again.",
            (
                "test_resume.py::test_what_a_compiler_died_for_is_tried_again",
                "test_runners.py::test_what_another_program_kills_is_measured_again",
                "test_programs.py::test_a_hung_compiler_does_not_hang_a_tune",
            ),
        ),
        Promise(
            "Runs that share a database try nothing twice, and learn from each other.",
            (
                "test_claims.py::test_processes_that_share_a_database_measure_nothing_twice",
                "test_claims.py::test_a_tune_within_a_tune_leaves_it_what_is_under_way_and_both_learn_all",
            ),
        ),
        Promise(
            "Two separate tunes on one GPU, of 100 trials for each problem, choose kernels whose speeds differ by 2 % "
            "or less in at least 95 % of the cells.",
            ("test_docs.py::test_two_tunes_are_compared_cell_by_cell",),
            tunes,
        ),
    ),
    "databases": (
        Promise(
            "A trial is stored before it is reported: a process that is killed loses none that it reported.",
            (
                "test_store.py::test_a_killed_process_loses_nothing_that_it_reported",
                "test_store.py::test_a_full_disk_loses_nothing_stored",
            ),
        ),
        Promise(
            "A damaged database is refused with a sentence, or read right. No damage names another winner.",
            (
                "test_store.py::test_a_damaged_file_is_refused_or_read_right",
                "test_store.py::test_no_changed_byte_changes_a_bundle",
                "test_store.py::test_no_damage_takes_a_winner_from_a_bundle",
            ),
        ),
        Promise(
            "Databases of every earlier schema are upgraded, and databases of a newer schema are refused. An upgrade "
            "that fails changes nothing.",
            (
                "test_store.py::test_a_database_of_every_earlier_schema_is_upgraded",
                "test_store.py::test_a_newer_schema_is_refused",
                "test_store.py::test_an_upgrade_that_fails_changes_nothing",
                "test_postgres.py::test_a_server_of_every_earlier_schema_is_upgraded",
            ),
        ),
        Promise(
            "A PostgreSQL server may be killed and started again: runs go on. A transaction is not done twice if the "
            "server committed it and could not say so. If the server stays away, runs end with a sentence, and the "
            "same command continues.",
            (
                "test_postgres.py::test_a_tune_outlives_a_restart",
                "test_postgres.py::test_what_was_committed_unheard_is_not_done_twice",
                "test_postgres.py::test_a_server_that_stays_away_ends_a_tune_with_a_sentence",
            ),
        ),
        Promise(
            "If eight tuners begin at once on one PostgreSQL database and one is killed, no trial is lost or recorded "
            "twice, neither in hadagen's tables nor in Optuna's.",
            (
                "test_postgres.py::test_of_eight_tuners_that_begin_at_once_one_is_killed_and_the_others_go_on",
                "test_claims.py::test_a_run_that_begins_meanwhile_leaves_optunas_tables_to_the_run_that_fills_them",
            ),
        ),
        Promise(
            "A server that cannot be used ends a command with one sentence that says why. No message contains a "
            "password.",
            (
                "test_postgres.py::test_a_server_that_cannot_be_used_is_one_sentence",
                "test_postgres.py::test_a_user_without_rights_is_one_sentence",
                "test_cli_failures.py::test_a_url_that_cannot_be_shows_no_password",
            ),
        ),
    ),
    "fleets": (
        Promise(
            "One run tunes on all GPUs of a fleet at once. Each class of GPUs gets its own trials and winners.",
            (
                "test_fleet.py::test_a_fleet_of_two_classes_finds_winners_for_each_whatever_a_worker_does",
                "test_nvml.py::test_classes_have_trials_and_winners_of_their_own",
            ),
            speed,
        ),
        Promise(
            "A worker that answers garbage or has another hadagen gets no work, and a sentence says so. Others do its "
            "work, and every trial is recorded once.",
            ("test_fleet.py::test_a_fleet_of_two_classes_finds_winners_for_each_whatever_a_worker_does",),
        ),
        Promise(
            "A fleet loses no finished trial and has none twice, whatever breaks: a worker is killed, hangs, answers "
            "garbage, cannot use its GPU or comes back with another driver; the run, the scheduler or the database "
            "server is killed. A run ends by itself or with a sentence, and the same command goes on.",
            ("test_fleet_kills.py::test_a_fleet_loses_nothing_whatever_breaks",),
            fleet_kills,
        ),
        Promise(
            "Workers of one user and machine that see the same GPU never measure on it at the same time. A worker that "
            "gets no GPU says so in a sentence, and other workers do its work. A race on a busy GPU is left for the "
            "next run. If a GPU fails, its worker goes on with its other GPUs.",
            (
                "test_station.py::test_workers_that_see_the_same_gpus_use_different_ones",
                "test_station.py::test_a_race_on_a_busy_gpu_is_left_for_later_and_its_worker_stays",
                "test_station.py::test_a_gpu_that_fails_leaves_its_worker_the_others",
            ),
        ),
        Promise(
            "A fleet without a scheduler or without a GPU ends a command with one sentence that says what to start.",
            ("test_fleet.py::test_without_a_scheduler_or_a_gpu_there_is_a_sentence",),
        ),
        Promise(
            "Every process of a local fleet listens on 127.0.0.1 alone. A fleet with TLS refuses whoever lacks its "
            "certificate. A fleet without TLS at another address than loopback brings a warning.",
            (
                "test_fleet.py::test_every_process_of_a_local_fleet_listens_on_loopback_alone",
                "test_fleet.py::test_only_a_client_with_the_certificate_of_the_fleet_reaches_it",
                "test_fleet.py::test_a_scheduler_beyond_loopback_without_tls_brings_a_warning",
            ),
        ),
        Promise(
            "A search with many variants in progress finds kernels as good as a search with one variant in progress, "
            "after at most 1.3 times the evaluations.",
            ("test_recording.py::test_a_search_with_many_variants_in_progress_finds_kernels_that_are_as_good",),
            search_in_parallel,
        ),
    ),
    "bundles": (
        Promise(
            "A bundle that was cut or changed, even to do harm, is refused or reads as before, within 2 s.",
            (
                "test_bundle_damage.py::test_no_damage_gets_past_the_checks",
                "test_bundle.py::test_a_truncated_file_is_noticed",
                "test_bundle.py::test_a_change_of_any_value_is_noticed",
            ),
            bundle_damage,
        ),
        Promise(
            "Where `HADAGEN_TRUSTED_KEYS` is set, calls use only bundles that one of these keys signed. This includes "
            "parts that are read later. The bundles of a release are signed.",
            (
                "test_signatures.py::test_calls_leave_out_what_no_trusted_key_signed",
                "test_signatures.py::test_what_is_read_later_was_signed_too",
                "test_signatures.py::test_a_setting_that_names_no_keys_is_an_error",
                "test_make.py::test_the_bundles_of_a_release_are_signed",
            ),
        ),
        Promise(
            "Bundles and compiled kernels that anyone but the user and root could change are not used. One warning "
            "names the path, the reason and the fix.",
            (
                "test_owners.py::test_bundles_in_a_folder_that_others_could_change_are_left_out",
                "test_owners.py::test_a_bundle_that_others_could_change_is_left_out",
                "test_owners.py::test_a_cache_that_others_could_change_is_neither_read_nor_written",
            ),
        ),
        Promise(
            "A read-only cache of compiled kernels is read, and a copied cache is found. If nothing can be written, "
            "PyTorch computes the transform.",
            (
                "test_recipes.py::test_a_cache_that_cannot_be_written_is_read",
                "test_recipes.py::test_a_cache_serves_a_copy_of_the_installation_at_another_place_and_time",
                "test_recipes.py::test_where_nothing_can_be_written_no_kernel_is_made",
            ),
        ),
        Promise(
            "A bundle is replaced only by a complete one, and calls that run meanwhile are served.",
            (
                "test_bundle.py::test_a_bundle_is_replaced_only_by_a_complete_one",
                "test_bundle.py::test_a_bundle_that_is_replaced_is_read_as_it_is_now",
            ),
        ),
        Promise(
            "A kernel that is compiled from a recipe is compared with PyTorch before its first result is given. A "
            "wrong one is never used.",
            (
                "test_runtime_loading.py::test_a_recipe_is_compiled_and_compared_once",
                "test_runtime_loading.py::test_a_wrong_kernel_is_never_used_nor_tried_again",
                "test_recipes.py::test_a_damaged_entry_is_made_again",
            ),
        ),
    ),
    "kernels": (
        Promise(
            "Every shipped kernel keeps the laws of a transform: it is linear, keeps norms, and has an inverse. A row "
            "does not depend on others, even if these are NaN. Nothing is written beside the result.",
            (
                "test_gpu_laws.py::test_every_shipped_kernel_keeps_the_laws",
                "test_laws.py::test_shipped_kernels_keep_the_laws",
                "test_laws.py::test_a_law_that_a_kernel_breaks_is_named",
                "test_laws.py::test_a_law_of_codes_that_a_kernel_breaks_is_named",
            ),
            laws,
        ),
        Promise(
            "compute-sanitizer finds nothing in any shipped kernel, with ragged rows and with arrays that end where "
            "their memory does. Each tool has to find a broken kernel first.",
            (
                "test_sanitize.py::test_launches_stay_in_memory_that_ends_where_the_rows_do",
                "test_sanitize.py::test_a_finding_is_counted_for_its_kernel",
                "test_sanitize.py::test_warnings_of_a_barrier_that_one_thread_prepares_are_counted_apart",
                "test_sanitize.py::test_a_second_look_is_at_barriers_where_each_lane_arrives",
                "test_sanitize.py::test_a_silent_tool_is_noticed",
            ),
            sanitizer,
        ),
        Promise(
            "A kernel that is broken in any one place is caught before it is timed.",
            (
                "test_mutations.py::test_a_broken_kernel_is_caught",
                "test_mutations.py::test_a_broken_primitive_is_caught",
            ),
        ),
        Promise(
            "No shipped winner exceeds the error bound of its problem.",
            ("test_bundle.py::test_the_shipped_winners_keep_their_bounds_and_are_legal",),
        ),
    ),
    "runtime": (
        Promise(
            "Bad input is answered with a sentence that says what to do, and launches nothing.",
            (
                "test_runtime_launch.py::test_bad_input_launches_nothing",
                "test_cli_failures.py::test_whatever_is_raised_becomes_a_sentence",
            ),
        ),
        Promise(
            "A damaged bundle of the user stops no call: it is left out, with one warning.",
            ("test_choose.py::test_damage_that_is_found_late_causes_a_warning_once",),
        ),
        Promise(
            "A GPU without kernels runs plain PyTorch.",
            ("test_gpu_runtime.py::test_a_gpu_without_kernels_runs_pytorch",),
        ),
        Promise(
            "Threads, streams, graphs and forks give the results of plain calls.",
            (
                "test_gpu_runtime_streams.py::test_threads_on_streams_of_their_own",
                "test_gpu_runtime_streams.py::test_cuda_graphs_replay_calls",
                "test_gpu_runtime_processes.py::test_a_fork_before_cuda_is_used",
                "test_runtime_launch.py::test_a_forked_child_knows_nothing_of_its_parent",
            ),
        ),
    ),
}


def promises_table(area: str) -> str:
    """The promises of an area, in Markdown."""
    rows = [
        (promise.text, "<br>".join(map(_link, promise.tests)), promise.figure() or "–") for promise in PROMISES[area]
    ]
    return grid("lll", ["promise", "tests", "figure"], rows)


def _link(test: str) -> str:
    file, _, name = test.partition("::")
    folder = "tests" if (Path(__file__).resolve().parent.parent / "tests" / file).exists() else "ci"
    return f"[{file}](../{folder}/{file}) {name.removeprefix('test_').replace('_', ' ')}"
