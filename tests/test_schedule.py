"""Schedules: what is refused, what runs, and files that are read back as they were or not at all."""

import json
import os
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

import diffrate
from diffrate import DiffRateError, Operator, Schedule, ScheduleError
from diffrate.schedule import FORMAT, LONGEST_FILE

VALID = {"format": FORMAT, "version": 1, "prune": [17, 12, 9], "merge": [17, 10, 8]}


def read(tmp_path, text):
    path = tmp_path / "schedule.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return Schedule.load(path)


# --- construction ------------------------------------------------------------------------------------------------


def test_lists_become_tuples_and_counts_are_kept_as_given():
    schedule = Schedule([17, 12, 9], [17, 10, 11])
    assert schedule.prune == (17, 12, 9)
    assert schedule.merge == (17, 10, 11)
    assert (schedule.depth, schedule.tokens, schedule.prefix) == (3, 17, 1)


@pytest.mark.parametrize(
    ("prune", "merge", "prefix", "sentence"),
    [
        ([17, 12], [17, 12, 9], 1, "prune has 2 blocks and merge has 3"),
        ([], [], 1, "prune is empty"),
        ([17, 0], [17, 1], 1, r"prune\[1\] is 0"),
        ([17, 12], [17, -3], 1, r"merge\[1\] is -3"),
        ([17, 18], [17, 12], 1, r"prune\[1\] is 18"),
        ([17, 12], [16, 12], 1, "first block is never compressed"),
        ([17, 12], [17, 3], 4, r"merge\[1\] is 3: counts go from 4"),
        ([17, 12.0], [17, 12], 1, r"prune\[1\] must be a whole number"),
        ([17, True], [17, 1], 1, r"prune\[1\] must be a whole number, not True"),
        ([17, 10**4000], [17, 1], 1, r"prune\[1\] is a huge number"),
        ([17, "12"], [17, 12], 1, "whole number"),
        ("17", [17], 1, "prune must be a list"),
        (17, [17], 1, "prune must be a list"),
        ({17: 1}, [17], 1, "prune must be a list"),
        ([17, 12], [17, 12], -1, "prefix must be"),
        ([17, 12], [17, 12], True, "prefix must be"),
        ([17, 12], [17, 12], 10**4000, "prefix must be .* not a huge number"),
    ],
)
def test_impossible_counts_are_refused(prune, merge, prefix, sentence):
    with pytest.raises(ScheduleError, match=sentence):
        Schedule(prune, merge, prefix)


def test_numbers_too_long_to_print_are_refused_too():
    for prune, prefix in (([9, 10**5000], 1), ([9, 5], 10**5000), ([9, 5], -(10**5000))):
        with pytest.raises(ScheduleError, match="a huge number"):
            Schedule(prune, [9, 5], prefix)


@pytest.mark.parametrize("img_size", [(224,), (224, 0), (224.0, 224), "no", (True, True), (1, 2, 3)])
def test_impossible_image_sizes_are_refused(img_size):
    with pytest.raises(ScheduleError, match="img_size"):
        Schedule([17], [17], img_size=img_size)


@given(st.data())
def test_effective_is_the_running_minimum(data):
    depth, tokens = data.draw(st.integers(1, 6)), data.draw(st.integers(2, 30))
    counts = st.lists(st.integers(1, tokens), min_size=depth - 1, max_size=depth - 1)
    schedule = Schedule([tokens, *data.draw(counts)], [tokens, *data.draw(counts)])
    running = schedule.effective
    flat = [n for pair in zip(schedule.prune, schedule.merge, strict=True) for n in pair]
    ran = [n for pair in zip(running.prune, running.merge, strict=True) for n in pair]
    assert ran == list(accumulate(flat, min))
    assert running.is_monotone
    assert running.effective == running
    assert schedule.is_monotone == (flat == ran)
    assert schedule.removes_nothing == (min(flat) == tokens)


def test_effective_keeps_what_is_known_of_the_origin():
    schedule = Schedule([9, 4, 6], [9, 4, 5], model="m", cost={"gmacs": 1.0}, made={"by": "hand"})
    assert schedule.effective.prune == (9, 4, 4)
    assert schedule.effective.merge == (9, 4, 4)
    assert (schedule.effective.model, schedule.effective.made) == ("m", {"by": "hand"})


def test_identity_removes_nothing():
    schedule = Schedule.identity(4, 17, prefix=2)
    assert schedule.removes_nothing
    assert schedule.merge == (17,) * 4
    assert not Schedule([17, 16], [17, 16]).removes_nothing


@given(st.integers(5, 60), st.integers(5, 60), st.integers(0, 4))
def test_resized_keeps_fractions_and_the_prefix(tokens, other, prefix):
    half = prefix + max((tokens - prefix) // 2, 1)
    least = max(prefix, 1)
    schedule = Schedule([tokens, half, least], [tokens, half, least], prefix, cost={"gmacs": 1.0})
    resized = schedule.resized(other)
    assert resized.tokens == other
    assert resized.merge[-1] == least if prefix else resized.merge[-1] >= 1
    assert resized.merge[1] > prefix or other == prefix  # a head may average what is left of the image
    fraction = (half - prefix) / (tokens - prefix)
    assert abs(resized.merge[1] - prefix - fraction * (other - prefix)) <= 1
    assert schedule.resized(tokens) is schedule
    assert other == tokens or resized.cost == {}


# --- files -------------------------------------------------------------------------------------------------------


def test_round_trip(tmp_path):
    schedule = Schedule(
        prune=[197, 180, 190],
        merge=[197, 170, 175],
        prefix=2,
        operator=Operator(importance="image-attention", mean="size", proportional=False, seed=3),
        model="deit_small_distilled_patch16_224",
        img_size=(224, 448),
        cost={"gmacs": 2.9, "images": 3},
        made={"by": "hand", "note": "ünïcode \ud800", "seed": 1},
    )
    path = tmp_path / "new" / "folder" / "schedule.json"
    schedule.save(path)
    assert Schedule.load(path) == schedule
    assert json.loads(path.read_text())["version"] == 1


@given(st.data())
def test_round_trip_of_any_schedule(data):
    depth, tokens, prefix = data.draw(st.tuples(st.integers(1, 5), st.integers(4, 99), st.integers(0, 4)))
    counts = st.lists(st.integers(max(prefix, 1), tokens), min_size=depth - 1, max_size=depth - 1)
    cost = data.draw(
        st.dictionaries(st.text(max_size=3), st.floats(allow_nan=False, allow_infinity=False) | st.integers())
    )
    schedule = Schedule([tokens, *data.draw(counts)], [tokens, *data.draw(counts)], prefix, cost=cost)
    assert Schedule.from_dict(json.loads(json.dumps(schedule.to_dict()))) == schedule


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "not a JSON schedule"),
        ("{", "not a JSON schedule"),
        (b"\xff\xfe\x00", "not a JSON schedule"),
        ("\ufeff{}", "not a JSON schedule"),
        ("[]", "no schedule"),
        ("null", "no schedule"),
        ("NaN", "NaN is no number"),
        ('{"format": "other"}', "no schedule"),
        ("[" * 100_000, "not a JSON schedule"),
        ('{"a":' * 100_000, "not a JSON schedule"),
        ('{"prune": ' + "9" * 5000 + "}", "not a JSON schedule"),
        ('{"format": "x", "format": "diffrate.schedule"}', "'format' is there twice"),
        (" " * (LONGEST_FILE + 1), "too large"),
    ],
)
def test_files_that_are_no_schedules(tmp_path, text, sentence):
    with pytest.raises(ScheduleError, match=sentence) as refused:
        read(tmp_path, text)
    assert len(str(refused.value)) < 300
    assert "\n" not in str(refused.value)


HUGE = int("9" * 4000)  # as long as Python's JSON reader lets a number be


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"version": 2}, "version 2 is not known"),
        ({"version": True}, "version True is not known"),
        ({"version": HUGE}, "version a huge number"),
        ({"prune": None}, "prune must be a list"),
        ({"prune": "17"}, "prune must be a list"),
        ({"prune": {"0": 17}}, "prune must be a list"),
        ({"prune": [17, 12, True]}, "whole number, not True"),
        ({"prune": [17, 12, 9.0]}, "whole number, not 9.0"),
        ({"prune": [17, 12, "9"]}, "whole number"),
        ({"prune": [17, 12, [9]]}, "whole number"),
        ({"prune": [17, 12, HUGE]}, "a huge number"),
        ({"prune": [17, 12, -HUGE]}, "a huge number"),
        ({"prune": [17, 12]}, "prune has 2 blocks"),
        ({"prune": [17, 12, 0]}, r"prune\[2\] is 0"),
        ({"prefix": HUGE}, "prefix must be"),
        ({"prefix": True}, "prefix must be"),
        ({"prefix": None}, "prefix must be"),
        ({"prefix": 9}, "counts go from 9"),
        ({"img_size": [224]}, "img_size"),
        ({"img_size": 224}, "img_size"),
        ({"img_size": [224, True]}, "img_size"),
        ({"model": 3}, "model name"),
        ({"model": []}, "model name"),
        ({"cost": []}, "cost in a schedule must be an object"),
        ({"cost": {"gmacs": "2.9"}}, "cost 'gmacs' in a schedule must be a finite number"),
        ({"cost": {"gmacs": True}}, "cost 'gmacs'"),
        ({"cost": {"gmacs": None}}, "cost 'gmacs'"),
        ({"made": 1}, "made in a schedule must be an object"),
        ({"operator": None}, "operator in a schedule file must be an object"),
        ({"operator": {"importance": ["random"]}}, "importance must be one of"),
        ({"operator": {"importance": {}}}, "importance must be one of"),
        ({"operator": {"operation": "drop"}}, "operation must be one of"),
        ({"operator": {"proportional": 1}}, "proportional must be true or false"),
        ({"operator": {"floor": -1}}, "floor must be a number"),
        ({"operator": {"floor": True}}, "floor must be a number"),
        ({"operator": {"floor": "high"}}, "floor must be a number"),
        ({"operator": {"image_share": 1.5}}, "image_share must be a number from 0 to 1"),
        ({"operator": {"memory": -0.1, "mean": "attention"}}, "memory must be a number from 0 to 1"),
        ({"operator": {"memory": 0.3}}, "memory goes with mean attention"),
        ({"operator": {"image_share": 0.5, "importance": "random"}}, "image_share goes with class attention"),
        ({"operator": {"seed": -1}}, "seed must be a whole number"),
        ({"operator": {"seed": True}}, "seed must be a whole number"),
        ({"operator": {"seed": 1.5}}, "seed must be a whole number"),
        ({"operator": {"seed": HUGE}}, "seed must be a whole number"),
        ({"operator": {"__class__": "x"}}, "unknown fields: '__class__'"),
        ({"extra": 1}, "unknown fields 'extra'"),
    ],
)
def test_wrong_values_in_a_file(tmp_path, changes, sentence):
    with pytest.raises(ScheduleError, match=sentence) as refused:
        read(tmp_path, json.dumps(VALID | changes))
    assert len(str(refused.value)) < 400
    assert "schedule.json" in str(refused.value)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_are_none(tmp_path, number):
    text = json.dumps(VALID | {"cost": {"gmacs": 1.5}}).replace("1.5", number)
    with pytest.raises(ScheduleError, match="number"):
        read(tmp_path, text)


@pytest.mark.parametrize("missing", ["format", "version", "prune", "merge"])
def test_missing_fields(tmp_path, missing):
    with pytest.raises(ScheduleError, match=missing):
        read(tmp_path, json.dumps({key: value for key, value in VALID.items() if key != missing}))


def test_files_that_cannot_be_read(tmp_path):
    for path in (tmp_path / "none.json", tmp_path, tmp_path / "none.json" / "below", tmp_path / "a\0b"):
        with pytest.raises(ScheduleError):
            Schedule.load(path)


def test_an_endless_file_is_not_read_to_its_end():
    if not os.path.exists("/dev/zero"):
        pytest.skip("needs /dev/zero")
    with pytest.raises(ScheduleError, match="too large"):
        Schedule.load("/dev/zero")


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.integers(-2, 20) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
nearly = st.fixed_dictionaries(
    {"format": st.just(FORMAT), "version": st.just(1)},
    optional={
        "prune": anything | st.lists(st.integers(-1, 9), max_size=4) | st.just([9, 5]),
        "merge": anything | st.lists(st.integers(-1, 9), max_size=4) | st.just([9, 5]),
        "prefix": anything | st.integers(0, 3),
        "operator": anything
        | st.dictionaries(
            st.sampled_from(["importance", "operation", "seed", "mean", "floor", "image_share"]), anything
        ),
        "cost": anything | st.dictionaries(st.text(max_size=5), anything, max_size=3),
        "made": anything | st.dictionaries(st.text(max_size=5), anything, max_size=3),
        "model": anything,
        "img_size": anything | st.lists(st.integers(-1, 9), max_size=3),
    },
)


@given(anything | nearly)
def test_garbage_is_refused_or_is_a_schedule_never_a_crash(values):
    try:
        schedule = Schedule.from_dict(values)
    except DiffRateError:
        return
    assert schedule.tokens >= schedule.effective.merge[-1] >= 1


@given(
    st.binary(max_size=60)
    | st.text(max_size=60).map(str.encode)
    | nearly.map(lambda v: json.dumps(v).encode())
)
def test_any_bytes_are_refused_or_are_a_schedule(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "garbage.json"
    path.write_bytes(data)
    try:
        schedule = Schedule.load(path)
    except DiffRateError:
        return
    assert schedule.tokens >= schedule.effective.merge[-1] >= 1


# --- writing -----------------------------------------------------------------------------------------------------


def test_a_failed_save_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "schedule.json"
    Schedule([9, 5], [9, 4]).save(path)
    before = path.read_bytes()

    def fails(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("diffrate.schedule.os.replace", fails)
    with pytest.raises(DiffRateError, match=r"cannot write .*No space left"):
        Schedule([9, 3], [9, 3]).save(path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["schedule.json"]


@pytest.mark.parametrize("made", [{"loss": float("nan")}, {"model": object()}], ids=["nan", "object"])
def test_what_could_not_be_read_back_is_not_written(tmp_path, made):
    with pytest.raises(ScheduleError, match="cannot write"):
        Schedule([9], [9], made=made).save(tmp_path / "schedule.json")
    assert not list(tmp_path.iterdir())


def test_save_where_nothing_can_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "schedule.json", tmp_path):
        with pytest.raises(DiffRateError, match="cannot write"):
            Schedule([9], [9]).save(path)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_public_names():
    assert diffrate.Schedule is Schedule
    assert issubclass(ScheduleError, DiffRateError)
    assert issubclass(DiffRateError, ValueError)
