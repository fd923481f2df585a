"""The scenario runner itself: what a file may say, what its answer is, and what the command prints."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import attrs
import pytest
from click.testing import CliRunner

from kvsched import Scheduler, SchedulerConfig
from kvsched.cli.group import group as main
from kvsched.memory import PagePool
from kvsched.scenario import STATE, Report, compare, parse, run
from kvsched.scenario.document import SCHEDULER_KEYS, InvalidScenario, Segment
from kvsched.scenario.expect import PLAN_KEYS, REQUEST_KEYS, TOTALS_KEYS
from kvsched.scenario.prompts import Vocabulary

CONFIG = {"page_size": 16, "pages": 20, "admission": "guaranteed"}
A = {"submit": {"id": "A", "prompt": 40, "max_new": 5}}


def answer(*events: Any, **config: Any) -> Report:
    text = json.dumps({"name": "a test", "config": {**CONFIG, **config}, "events": list(events)})
    try:
        return run(parse(text))
    except InvalidScenario as error:
        return Report("a test", 2, (str(error),), None)


def words(report: Report) -> str:
    return "\n".join(report.failures)


# --- what is not a scenario -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "said"), [
    ("{", "not JSON"),
    ("[]", "the file must be an object with keys name, config, events"),
    ('{"config": {"page_size": 16, "pages": 1}}', "lacks the key 'events'"),
    ('{"events": []}', "lacks the key 'config'"),
    ('{"config": {"page_size": 16, "pages": 1}, "events": {}}', "events must be a list"),
    ('{"config": {"page_size": 16, "pages": 1}, "events": [], "note": ""}', "unknown key 'note'; allowed: name, config, events"),
    ('{"config": {"page_size": 16, "pages": 1, "pages": 2}, "events": []}', "'pages' stands twice"),
    ('{"config": {"page_size": 16, "pages": 1, "conservativeness": NaN}, "events": []}', "NaN"),
    ('{"config": {"pages": 1}, "events": []}', "config lacks the key 'page_size'"),
    ('{"config": {"page_size": 16}, "events": []}', "config lacks the key 'pages'"),
    ('{"name": 3, "config": {"page_size": 16, "pages": 1}, "events": []}', "name must be a string"),
])
def test_a_file_that_is_none(text: str, said: str) -> None:
    with pytest.raises(InvalidScenario, match=said.replace("(", r"\(")):
        parse(text)


@pytest.mark.parametrize(("key", "value", "said"), [
    ("pagesize", 16, "unknown key 'pagesize'; allowed: page_size,"),
    ("pages", 0, "config.pages must be an integer of at least 1"),
    ("pages", True, "config.pages must be an integer"),
    ("reserved_pages", 20, "config.reserved_pages must be below pages = 20"),
    ("page_size", 1.5, "config.page_size must be an integer"),
    ("max_running", None, "config.max_running must be an integer"),
    ("order", "lifo", "config.order must be one of fcfs, lpm"),
    ("head", "lax", "config.head must be one of strict, backfill, skip"),
    ("admission", "sometimes", "config.admission must be one of guaranteed, expected"),
    ("eviction", "mru", "config.eviction must be one of lru, lfu"),
    ("prefix_cache", 1, "config.prefix_cache must be true or false"),
    ("conservativeness", -1, "config.conservativeness must be a number of at least 0"),
    ("max_in_flight", 3, "max_in_flight must be 1 or 2"),
    ("window", 128, "config.window is not supported yet"),
    ("window_pages", 8, "config.window_pages is not supported yet"),
    ("state_slots", 4, "config.state_slots is not supported yet"),
    ("state_slots_per_request", None, "config.state_slots_per_request must be an integer of at least 0"),
    ("state_transient_slots", -1, "config.state_transient_slots must be an integer of at least 0"),
    ("max_attended_tokens", 8192, "config.max_attended_tokens is not supported yet"),
])
def test_a_bad_config(key: str, value: Any, said: str) -> None:
    report = answer(**{key: value})
    assert report.code == 2
    assert said in words(report)


def test_features_that_are_off_are_no_error() -> None:
    off = {"window": None, "window_pages": None, "state_slots": None, "state_slots_per_request": 2, "state_transient_slots": 0}
    assert answer(A, {"step": 1}, **off, max_attended_tokens=None).code == 0


@pytest.mark.parametrize(("event", "said"), [
    ({}, "must be an object with one key"),
    ("step", "must be an object with one key"),
    ({"steps": 3}, "unknown key 'steps'; allowed: submit, ready"),
    ({"step": 1, "abort": "A"}, "unknown key 'abort' beside step"),
    ({"step": 0}, "step must be an integer of at least 1"),
    ({"step": True}, "step must be an integer"),
    ({"step": 1.0}, "step must be an integer"),
    ({"schedule": False}, "schedule must be true"),
    ({"pause": "gently"}, "pause must be one of retract, hold"),
    ({"abort": 3}, "abort must be a string"),
    ({"until": "idle"}, "until needs the key 'max_steps'"),
    ({"until": "rest", "max_steps": 3}, 'until must be "idle"'),
    ({"until": {"finished": "A", "running": "A"}, "max_steps": 3}, 'until must be "idle"'),
    ({"until": {"finished": "B"}, "max_steps": 3}, "names 'B', and no request of that id was submitted"),
    ({"set": {}}, "at least one key of max_running"),
    ({"set": {"page_size": 8}}, "unknown key 'page_size'; allowed: max_running"),
    ({"set": {"max_running": 0}}, "max_running must be an integer of at least 1"),
    ({"set": {"order": "lifo"}}, "order must be one of"),
    ({"commit": True}, "commit needs a plan in flight"),
    ({"commit": {"taken": {}}}, "unknown key 'taken'; allowed: accepted"),
    ({"rollback": True}, "rollback needs a plan in flight"),
    ({"hold_pages": {"id": "x"}}, "lacks the key 'pages'"),
    ({"hold_pages": {"id": "x", "pages": 0}}, "pages must be an integer of at least 1"),
    ({"hold_pages": {"id": "x", "pages": 21}}, "hold of 21 pages, but 20"),
    ({"release_pages": {"id": "x"}}, "'x' holds no pages"),
    ({"release_pages": "x"}, "release_pages must be an object"),
    ({"submit": {"id": "B"}}, "lacks the key 'prompt'"),
    ({"submit": {"prompt": 3}}, "lacks the key 'id'"),
    ({"submit": {"id": "", "prompt": 3}}, "submit.id must be a string of at least one character"),
    ({"submit": {"id": "A", "prompt": 3}}, "'A' is live already"),
    ({"submit": {"id": "B", "prompt": 0}}, "submit.prompt must be an integer of at least 1, not 0"),
    ({"submit": {"id": "B", "prompt": []}}, "submit.prompt must hold at least one token"),
    ({"submit": {"id": "B", "prompt": [["s", 0]]}}, "submit.prompt[0][1] must be an integer of at least 1"),
    ({"submit": {"id": "B", "prompt": [["s"]]}}, "submit.prompt[0] must be a pair"),
    ({"submit": {"id": "B", "prompt": 3, "max_new": -1}}, "submit.max_new must be an integer of at least 0 or null"),
    ({"submit": {"id": "B", "prompt": 3, "max_new": 1.5}}, "submit.max_new must be an integer"),
    ({"submit": {"id": "B", "prompt": 3, "max_new": True}}, "submit.max_new must be an integer"),
    ({"submit": {"id": "B", "prompt": 3, "max_new_tokens": 1}}, "unknown key 'max_new_tokens'; allowed: id, prompt"),
    ({"submit": {"id": "B", "prompt": 3, "stop_after": 0}}, "submit.stop_after must be an integer of at least 1"),
    ({"submit": {"id": "B", "prompt": 3, "n": 0}}, "submit.n must be an integer of at least 1"),
    ({"submit": {"id": "B", "prompt": 3, "ready": 1}}, "submit.ready must be true or false"),
    ({"submit": {"id": "B", "prompt": 3, "namespace": {"adapter": "x"}}}, "unknown key 'adapter'; allowed: version, salt"),
    ({"submit": {"id": "B", "prompt": 3, "namespace": {"salt": 1}}}, "submit.namespace.salt must be a string"),
    ({"submit": {"id": "B", "prompt": [["@A", 1]]}}, "names 1 tokens of '@A'; allowed: the 0 that it generated"),
    ({"submit": {"id": "B", "prompt": [["@Z", 1]]}}, "'@Z': no request of that id was accepted"),
    ({"expect": {"frei": 1}}, "unknown key 'frei'; allowed: step, usable"),
    ({"expect": {"plan": {"prefills": []}}}, "expect.plan has an unknown key 'prefills'; allowed: prefill"),
    ({"expect": {"requests": {"A": {"state": 1}}}}, "expect.requests.A has an unknown key 'state'; allowed: status"),
    ({"expect": {"totals": 3}}, "expect.totals must be null or an object"),
    ({"expect": {"free": {"least": 1}}}, "expect.free has an unknown key 'least'; allowed: min, max"),
    ({"expect": {"free": {"min": "1"}}}, "expect.free.min must be a number"),
    ({"expect": {"free": {}}}, "expect.free is an object without keys"),
    ({"expect": {"running": [{"min": 1}]}}, "lists match exactly"),
])
def test_a_bad_event(event: Any, said: str) -> None:
    report = answer(A, event)
    assert report.code == 2
    assert said in words(report)
    assert "event 1" in words(report)


@pytest.mark.parametrize("events", [
    ({"schedule": True}, {"schedule": True}),
    ({"schedule": True}, {"step": 1}),
    (A, {"schedule": True}, {"commit": True}, {"commit": True}),
    (A, {"schedule": True}, {"commit": {"accepted": {"B": 0}}}),
    (A, {"schedule": True}, {"commit": {"accepted": {"A": 1}}}),
    (A, {"step": 1}, {"schedule": True}, {"commit": {"accepted": {"A": 1}}}),
])
def test_a_bad_sequence(events: tuple[Any, ...]) -> None:
    assert answer(*events).code == 2


def test_a_bad_value_is_found_before_anything_runs() -> None:
    report = answer(A, {"expect": {"free": 0}}, {"step": "many"})
    assert (report.code, report.state) == (2, None)
    assert "free" not in words(report)


# --- what a run answers -----------------------------------------------------------------------------------------------------


def test_the_state_has_exactly_the_keys_that_may_be_expected() -> None:
    state = answer(A, {"step": 2}, {"submit": {"id": "B", "prompt": 4000}}, {"flush": True}).state
    assert state is not None
    assert set(state) == set(STATE)
    assert set(state["requests"]["A"]) == set(REQUEST_KEYS)
    assert set(state["totals"]) == set(TOTALS_KEYS)
    assert set(state["plan"]) == set(PLAN_KEYS)
    assert set(state["refused"]["B"]) == {"reason", "needed", "available", "retryable"}
    assert set(state["flushed"]) == {"ok", "reason"}
    assert json.loads(json.dumps(state)) == state


@pytest.mark.parametrize("end", [[{"until": "idle", "max_steps": 9}], [{"abort": "A"}], [{"abort_all": True}]])
def test_a_request_that_ended_keeps_its_keys(end: list[Any]) -> None:
    state = answer(A, {"step": 2}, *end).state
    assert state is not None
    assert set(state["requests"]["A"]) == set(REQUEST_KEYS)
    assert state["requests"]["A"]["pages"] == 0
    assert state["max_gap"] == {"A": 1}


def test_before_anything_happened() -> None:
    report = answer({"expect": {"step": 0, "flushed": None, "stalled": False, "refused": {"A": None}, "requests": {"A": None},
                                "plan": {"prefill": [], "decode": []}, "max_gap": {"A": None}, "usable": 20, "free": 20}})
    assert report.code == 0, words(report)


@pytest.mark.parametrize(("expected", "said"), [
    ({"free": 16}, "free: expected 16, got 17"),
    ({"free": {"min": 18}}, 'free: expected {"min": 18}, got 17'),
    ({"free": {"min": 1, "max": 16}}, 'free: expected {"min": 1, "max": 16}, got 17'),
    ({"free": True}, "free: expected true, got 17"),
    ({"stalled": 0}, "stalled: expected 0, got false"),
    ({"running": ["A", "B"]}, 'running: expected ["A", "B"], got ["A"]'),
    ({"running": []}, 'running: expected [], got ["A"]'),
    ({"requests": {"A": {"status": "waiting"}}}, 'requests.A.status: expected "waiting", got "running"'),
    ({"requests": {"A": None}}, "requests.A: expected null, got {"),
    ({"requests": {"B": {"computed": 1}}}, 'requests.B: expected {"computed": 1}, got absent'),
    ({"refused": {"B": {"needed": 1}}}, 'refused.B: expected {"needed": 1}, got absent'),
    ({"max_gap": {"B": 1}}, "max_gap.B: expected 1, got absent"),
    ({"flushed": {"ok": True}}, 'flushed: expected {"ok": true}, got null'),
    ({"plan": {"prefill": [["A", 0, 39]]}}, 'plan.prefill: expected [["A", 0, 39]], got [["A", 0, 40]]'),
    ({"ratio": 0.0981}, "ratio: expected 0.0981, got 0.098"),
])
def test_an_unmet_expectation(expected: Any, said: str) -> None:
    report = answer(A, {"step": 1}, {"expect": expected})
    assert report.code == 1
    assert f"event 2 (expect): {said}" in words(report)
    assert report.state is not None


def test_numbers_match_as_bounds() -> None:
    bounds = {"free": {"min": 17, "max": 17}, "step": {"min": 1}, "ratio": {"max": 0.0980000001}, "cached": {"max": 0}}
    assert answer(A, {"step": 1}, {"expect": bounds}).code == 0


def test_every_mismatch_is_reported_and_the_run_goes_on() -> None:
    report = answer(A, {"step": 1}, {"expect": {"free": 0, "step": 0}}, {"until": "idle", "max_steps": 9}, {"expect": {"step": 0}})
    assert len(report.failures) == 3
    assert report.state is not None
    assert report.state["totals"]["finished"] == 1


def test_until_that_is_not_reached_says_who_is_left_and_why() -> None:
    report = answer({"submit": {"id": "W", "prompt": 16, "ready": False}}, A, {"step": 1}, {"until": {"running": "W"}, "max_steps": 3},
                    {"expect": {"free": 0}})
    assert report.code == 1
    assert report.failures == ("event 3 (until): expected W running within 3 steps, got: W waiting (host); A running",)


@pytest.mark.parametrize("condition", ["idle", {"finished": "A"}, {"running": "A"}])
def test_until_that_holds_already_takes_no_step(condition: Any) -> None:
    done = [] if condition == {"running": "A"} else [{"step": 4}]
    report = answer(A, {"step": 1}, *done, {"until": condition, "max_steps": 0}, {"expect": {"step": 1 + 4 * len(done)}})
    assert report.code == 0, words(report)


def test_until_commits_what_is_in_flight_first() -> None:
    report = answer(A, {"step": 4}, {"schedule": True}, {"until": "idle", "max_steps": 0}, {"expect": {"totals": {"finished": 1}}})
    assert report.code == 0, words(report)


def test_a_refused_id_never_ends() -> None:
    report = answer({"submit": {"id": "A", "prompt": 4000}}, {"until": {"finished": "A"}, "max_steps": 2})
    assert report.code == 1


def test_step_with_a_plan_in_flight_ends_that_one_first() -> None:
    report = answer(A, {"schedule": True}, {"step": 1}, {"expect": {"step": 2, "requests": {"A": {"generated": 2}}}},
                    {"schedule": True}, max_in_flight=2)
    assert report.code == 0, words(report)


def test_an_id_used_again_starts_anew() -> None:
    again = copy.deepcopy(A)
    again["submit"]["max_new"] = 9
    report = answer(A, {"until": "idle", "max_steps": 9}, again, {"expect": {"requests": {"A": {"status": "waiting", "finish": None}}}},
                    {"until": {"finished": "A"}, "max_steps": 9}, {"expect": {"requests": {"A": {"generated": 9}}}})
    assert report.code == 0, words(report)


def test_an_id_used_again_while_a_plan_still_names_it() -> None:
    again = {"submit": {"id": "A", "prompt": 20, "max_new": 2, "stop_after": 1}}
    report = answer(A, {"schedule": True}, {"abort": "A"}, again, {"commit": True}, {"expect": {"requests": {"A": {"generated": 0}}}},
                    {"until": "idle", "max_steps": 5}, {"expect": {"requests": {"A": {"generated": 1, "finish": "stop"}}}})
    assert report.code == 0, words(report)


def test_stop_token_among_drafts_and_in_blocks() -> None:
    draft = {"submit": {"id": "S", "prompt": 16, "max_new": 9, "stop_after": 3}}
    report = answer(draft, {"step": 1}, {"schedule": True}, {"commit": {"accepted": {"S": 2}}},
                    {"expect": {"requests": {"S": {"generated": 3, "finish": "stop"}}}}, lookahead_tokens=3)
    assert report.code == 0, words(report)
    block = {"submit": {"id": "S", "prompt": 16, "max_new": 32, "stop_after": 4, "block_tokens": 8}}
    report = answer(block, {"step": 2}, {"expect": {"requests": {"S": {"generated": 4, "finish": "stop"}}}})
    assert report.code == 0, words(report)


def test_generated_tokens_carry_the_stop_token() -> None:
    stop = {"submit": {"id": "S", "prompt": [["s", 14]], "max_new": 9, "stop_after": 3}}
    plain = {"submit": {"id": "P", "prompt": [["s", 14]], "max_new": 3}}
    follow = [{"submit": {"id": "F", "prompt": [["s", 14], [f"@{name}", 3], ["t", 1]], "max_new": 1}} for name in ("S", "P")]
    done = {"until": "idle", "max_steps": 9}
    for first, hit in ((stop, 16), (plain, 16)):
        report = answer(first, done, follow[first is plain], {"step": 1}, {"expect": {"requests": {"F": {"cached": hit}}}})
        assert report.code == 0, words(report)


def test_generated_tokens_of_a_parent_are_named_by_child() -> None:
    many = {"submit": {"id": "M", "prompt": 16, "max_new": 2, "n": 2}}
    report = answer(many, {"step": 5}, {"submit": {"id": "F", "prompt": [["@M", 1]]}})
    assert "name one of M/0, M/1" in words(report)
    assert answer(many, {"step": 5}, {"submit": {"id": "F", "prompt": [["@M/1", 1]]}}).code == 0


def test_a_broken_law_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PagePool, "free", property(lambda _: 3))
    report = answer(A, {"step": 1})
    assert report.code == 1
    assert "a law of the scheduler is broken" in words(report)


def test_a_crash_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(*_: Any) -> None:
        raise IndexError("beyond")

    monkeypatch.setattr(Scheduler, "schedule", crash)
    report = answer(A, {"step": 1})
    assert (report.code, words(report)) == (1, "event 1 (step): the scheduler raised IndexError: beyond")


def test_config_keys_cover_the_scheduler() -> None:
    keys = {field.name for field in attrs.fields(SchedulerConfig)}
    assert keys - set(SCHEDULER_KEYS) == {"fair_weights"}
    assert set(SCHEDULER_KEYS) <= keys


# --- token ids --------------------------------------------------------------------------------------------------------------


def submits(*prompts: Any) -> list[Any]:
    events = [{"submit": {"id": str(index), "prompt": prompt}} for index, prompt in enumerate(prompts)]
    return [event.value for event in parse(json.dumps({"config": CONFIG, "events": events})).events]


def test_equal_names_share_tokens_and_different_names_none() -> None:
    found = submits([["s", 5], ["u", 3]], [["s", 8]], [["u", 9]], 7, 7)
    vocabulary = Vocabulary(found)
    tokens = [vocabulary.tokens(submit.prompt, lambda _: pytest.fail("nothing was generated")).tolist() for submit in found]
    assert tokens[0][:5] == tokens[1][:5]
    assert tokens[0][5:] == tokens[2][:3]
    apart = [set(tokens[1]), set(tokens[2]), set(tokens[3]), set(tokens[4]), {0, 1}]
    assert sum(map(len, apart)) == len(set().union(*apart))


def test_too_many_tokens_for_int32() -> None:
    with pytest.raises(InvalidScenario, match="different tokens; allowed: 2147483646"):
        Vocabulary([*submits(2**31 - 2), *submits(1, 2, [["x", 5]])])


def test_segments_that_were_generated() -> None:
    (submit,) = submits([["@A", 3]])
    assert submit.prompt == (Segment("A", 3, generated=True),)


def test_compare_needs_equal_types() -> None:
    state = {"free": 1, "ratio": 0.5, "running": ["A"], "stalled": False, "plan": {"prefill": [["A", 0, 1]]}}
    assert not compare({"ratio": 0.5 + 1e-12, "running": ["A"]}, state)
    assert not compare({"free": 1.0}, state)
    assert compare({"free": "1"}, state)
    assert compare({"free": None}, state)
    assert compare({"stalled": None}, state)
    assert compare({"plan": {"prefill": [["A", False, 1]]}}, state)
    assert compare({"plan": None}, state)


# --- the command ------------------------------------------------------------------------------------------------------------


def write(path: Path, *events: Any) -> str:
    path.write_text(json.dumps({"name": "a test", "config": CONFIG, "events": list(events)}))
    return str(path)


def test_the_command_answers_with_the_worst_code(tmp_path: Path) -> None:
    held = write(tmp_path / "held.json", A, {"step": 1}, {"expect": {"step": 1}})
    unmet = write(tmp_path / "unmet.json", A, {"step": 1}, {"expect": {"step": 2}})
    bad = write(tmp_path / "bad.json", {"stop": 1})
    runner = CliRunner()
    for files, code in (([held], 0), ([held, unmet], 1), ([unmet, held], 1), ([bad, unmet], 2), ([str(tmp_path / "none.json")], 2)):
        assert runner.invoke(main, ["scenario", *files]).exit_code == code
    said = runner.invoke(main, ["scenario", held, unmet, bad])
    assert f"{held}: ok: a test (1 expectation held)" in said.stdout
    assert f"{unmet}: event 2 (expect): step: expected 2, got 1" in said.stdout
    assert f"{bad}: event 0: unknown key 'stop'; allowed: submit," in said.stderr


def test_the_command_prints_the_state(tmp_path: Path) -> None:
    held = write(tmp_path / "held.json", A, {"step": 1})
    unmet = write(tmp_path / "unmet.json", A, {"until": "idle", "max_steps": 9}, {"expect": {"step": 2}})
    bad = write(tmp_path / "bad.json", {"stop": 1})
    said = CliRunner().invoke(main, ["scenario", "--json", held, unmet, bad])
    assert said.exit_code == 2
    states = [json.loads(line) for line in said.stdout.splitlines()]
    assert [state.get("step") for state in states] == [1, 5, None]
    assert set(states[0]) == set(STATE)
    assert "unknown key 'stop'" in states[2]["error"]
    assert "step: expected 2, got 5" in said.stderr


def test_the_command_helps() -> None:
    runner = CliRunner()
    assert "replay" in runner.invoke(main, ["--help"]).stdout
    assert "kvsched, version" in runner.invoke(main, ["--version"]).stdout
    assert runner.invoke(main, ["scenario"]).exit_code == 2
    assert "No such command" in runner.invoke(main, ["sing"]).stderr


def test_help_imports_no_subcommand_and_no_click_says_what_to_install() -> None:
    code = "import sys; from kvsched.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
    code += "assert not [name for name in sys.modules if name.startswith('kvsched.cli.') and name != 'kvsched.cli.group']"
    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == 0
    code = "import sys; sys.modules['click'] = None\nfrom kvsched.cli import main; main()"
    said = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert said.returncode == 1
    assert said.stderr == "kvsched needs the packages of its command line: pip install 'kvsched[cli]'\n"
