"""The issue forms: fields as GitHub reads them, and commands that exist."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from hadagen.cli.main import main

ROOT = Path(__file__).resolve().parent.parent
FORMS = sorted(path for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml") if path.stem != "config")
KINDS = {"textarea": {"render"}, "input": {"placeholder"}, "dropdown": {"options"}}


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_a_form_is_one_that_github_takes(path: Path) -> None:
    form: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert form.keys() == {"name", "description", "labels", "body"}
    assert len({field["id"] for field in form["body"]}) == len(form["body"])
    for field in form["body"]:
        assert field.keys() - {"validations"} == {"type", "id", "attributes"}
        assert re.fullmatch("[a-z_]+", field["id"])
        assert {"label"} <= field["attributes"].keys() <= {"label", "description"} | KINDS[field["type"]]
        assert field.get("validations", {"required": True}) == {"required": True}
        assert all(isinstance(option, str) for option in field["attributes"].get("options", ()))
    doctor = form["body"][0]
    assert (doctor["id"], doctor["validations"]) == ("doctor", {"required": True})
    for command in re.findall("hadagen ([a-z]+)", path.read_text(encoding="utf-8")):
        assert command in main.commands or command in ("does", "only")


def test_there_is_a_form_for_each_kind_of_report() -> None:
    assert [path.stem for path in FORMS] == ["bug", "new_gpu", "slow_kernel", "wrong_result"]
