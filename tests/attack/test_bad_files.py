"""A sample of the damaged files; `make attack` runs thousands of them."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import diffrate
from attack.files import SCHEDULE, Targets
from attack.outcome import REFUSED
from diffrate.costs.gemmini.design import Design
from diffrate.costs.table import LatencyTable
from diffrate.errors import DiffRateError

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Targets:
    return Targets(tmp_path_factory.mktemp("attack"))


def test_every_kind_of_damaged_file(targets: Targets) -> None:
    for kind in targets.uses:
        found = targets.attack(kind, 12, seed=7)
        assert not found.defects
        assert found.ended[REFUSED] > 0, kind


def test_the_good_files_are_accepted(targets: Targets, tmp_path: Path) -> None:
    """Or the attacks would show nothing: every refusal could be of the file as it was."""
    for kind, (where, use) in targets.uses.items():
        if kind != "segmentation settings":  # whose weights are none
            use(targets.good / where.split("/")[0])


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.dictionaries(st.sampled_from(sorted(SCHEDULE.to_dict())), JSON, min_size=1, max_size=3))
def test_any_values_in_a_schedule(changes: dict[str, object]) -> None:
    try:
        schedule = diffrate.Schedule.from_dict({**SCHEDULE.to_dict(), **changes})
    except DiffRateError:
        return
    assert diffrate.Schedule.from_dict(schedule.to_dict()) == schedule


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.binary(max_size=40) | JSON.map(lambda values: repr(values).encode(errors="replace")))
def test_any_bytes_for_a_table_or_a_design(text: bytes, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(text)
    for read in (LatencyTable.load, Design.load, diffrate.Schedule.load):
        with pytest.raises(DiffRateError):
            read(tmp_path / "file")


def test_the_tables_own_checks(targets: Targets, tmp_path: Path) -> None:
    good = (targets.good / "files" / "table.json").read_text()
    for old, new, sentence in (
        ('"tokens": 65', '"tokens": 1000000000', "tokens must be whole numbers from 1 to"),
        ('"around": 0.5', '"around": NaN', "NaN is no number"),
        ('"around": 0.5', '"around": 1e300', "around must be numbers"),
        ('"n": [1, 10, 65]', '"n": [1, 65, 10]', "rising token counts"),
        ('"kind_of": [0, 0, 0, 0]', '"kind_of": [0, 0, 0, 1]', "kind_of must be whole numbers from 0 to 0"),
        ('"kind_of": [0, 0, 0, 0]', '"kind_of": [0, 0]', "one entry for each of the 4 blocks"),
    ):
        assert old in good
        (tmp_path / "table.json").write_text(good.replace(old, new))
        with pytest.raises(DiffRateError, match=sentence):
            LatencyTable.load(tmp_path / "table.json")
