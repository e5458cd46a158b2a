from __future__ import annotations

import json
from dataclasses import replace
from html.parser import HTMLParser

from tests.unit.scriptprofile.watched import loop, node

from stoker.scriptprofile.loops import Loop
from stoker.scriptprofile.observations import Place
from stoker.scriptprofile.page import page_html
from stoker.scriptprofile.profile import ScriptProfile
from stoker.scriptprofile.rules.finding import ScriptFinding

BAD = '<script>alert(1)</script>"&'


GPU = {
    "index": 0,
    "name": BAD,
    "utilization": 0.42,
    "used_bytes": 2**32,
    "power_w": 250.0,
    "clock_mhz": 1410.0,
}


class Parsed(HTMLParser):
    """The tags in their order, and the text; every tag that is opened is closed."""

    VOID = ("meta",)

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(page)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.append(tag)
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def profile(
    *,
    loops: tuple[Loop, ...] = (),
    findings: tuple[ScriptFinding, ...] = (),
    minor: tuple[ScriptFinding, ...] = (),
    exit_code: int = 0,
    backend: str = "",
) -> ScriptProfile:
    return ScriptProfile(
        command=("python", BAD),
        exit_code=exit_code,
        ended_by="itself",
        wall_s=3.0,
        tensorflow="2.21.0" if loops else "",
        keras="",
        backend=backend,
        gpus=0,
        peak_memory_bytes=3 * 2**29,
        gpu_peak_bytes=(2**30,),
        gpu_states=(GPU,),
        loops=loops,
        findings=findings,
        minor=minor,
        failures=(BAD,),
    )


def a_loop() -> Loop:
    return loop(
        place=Place(file=f"/home/{BAD}.py", line=3),
        passes=2,
        steps=12,
        measured_steps=10,
        period_s=0.1,
        wait_s=0.05,
        call_s=0.03,
        rows=8,
        stages=(),
        nodes=(node(f"Map{BAD}", 1.0),),
        timeline=tuple((0.01 * n, 0.005, 0.003, 0.0, 0.01) for n in range(12)),
    )


def a_finding() -> ScriptFinding:
    return ScriptFinding(
        kind="sequential_map",
        place=Place(file=BAD, line=1),
        observation=BAD,
        why=BAD,
        change=BAD,
        gain=(1.0, 2.0),
        sure="likely",
    )


def test_the_page_holds_the_bars_the_timeline_and_the_findings() -> None:
    parsed = Parsed(page_html(profile(loops=(a_loop(),), findings=(a_finding(),))))

    assert parsed.tags.count("svg") == 2
    assert 'class="finding"' in page_html(profile(loops=(a_loop(),), findings=(a_finding(),)))
    # Three bars and four lanes on their tracks, and three spans of each of the ten steps that are shown.
    assert parsed.tags.count("rect") == 3 + 3 + 4 + 3 * 10
    for text in ("W 50.0%", "U was not measured", "sequential_map", "1x to 2x", "The first steps"):
        assert text in parsed.text


def test_nothing_of_the_users_becomes_a_tag() -> None:
    parsed = Parsed(page_html(profile(loops=(a_loop(),), findings=(a_finding(),))))

    assert "script" not in parsed.tags
    assert BAD in parsed.text


def test_a_command_without_tensorflow_is_reported_as_such() -> None:
    parsed = Parsed(page_html(profile()))

    assert "TensorFlow was not imported" in parsed.text
    assert "svg" not in parsed.tags


def test_another_backend_of_keras_is_named() -> None:
    assert (
        "Keras runs on jax here, but only training with TensorFlow" in profile(backend="jax").note()
    )
    assert "TensorFlow was not imported" in profile(backend="tensorflow").note()


def test_loops_of_several_processes_are_told_apart() -> None:
    one, other = replace(a_loop(), pid=11), replace(a_loop(), pid=12)

    assert "(process" not in profile(loops=(one, one)).name_of(one)
    folds = [replace(a_loop(), model={"name": f"fold_{number}"}) for number in (1, 2)]
    assert profile(loops=tuple(folds)).name_of(folds[1]).endswith(" of fold_2")
    assert "fold" not in profile(loops=(folds[0],)).name_of(folds[0])
    several = profile(loops=(one, other))
    assert several.name_of(other).endswith("(process 12)")
    assert "(process 11)" in Parsed(page_html(several)).text
    assert [each["pid"] for each in several.to_json()["loops"]] == [11, 12]


def test_that_a_script_failed_stands_before_all_that_was_seen() -> None:
    failed, killed = profile(exit_code=1), profile(loops=(a_loop(),), exit_code=137)

    text = Parsed(page_html(failed)).text
    assert "The script failed: exit code 1" in text
    assert text.index("The script failed") < text.index("failed before it imported TensorFlow")
    assert "-E" not in text
    assert killed.ending().startswith("the script failed: exit code 137, from SIGKILL")
    assert not profile().failed
    assert profile().ending() == "exit code 0"


def test_what_is_worth_little_stands_apart_from_the_findings() -> None:
    shown = profile(loops=(a_loop(),), minor=(a_finding(),))
    parsed = Parsed(page_html(shown))

    assert 'class="finding"' not in page_html(shown)
    assert "costs enough time here to be a finding" in parsed.text
    assert "Also seen, but with little effect here" in parsed.text
    assert [each["kind"] for each in shown.to_json()["minor_findings"]] == ["sequential_map"]
    assert (
        "None of the known causes of slow training was found."
        in Parsed(page_html(profile(loops=(a_loop(),)))).text
    )


def test_the_profile_is_json() -> None:
    facts = json.loads(
        json.dumps(profile(loops=(a_loop(),), findings=(a_finding(),)).to_json(), allow_nan=False)
    )

    assert facts["loops"][0]["step"]["input_wait"] == 0.5
    assert facts["loops"][0]["step"]["busy_fraction"] is None
    assert facts["findings"][0]["gain"] == [1.0, 2.0]
    assert facts["watcher_failures"] == [BAD]


def test_memory_and_what_nvml_says_of_the_gpus_are_shown() -> None:
    shown = profile()
    text = Parsed(page_html(shown)).text

    assert "1.50 GiB, a process's peak" in text
    assert "1.00 GiB, peak" in text
    assert "42% busy, 4.0 GiB, 250 W, 1410 MHz" in text
    found = json.loads(json.dumps(shown.to_json()))
    assert found["memory"] == {"process_peak_bytes": 3 * 2**29, "gpu_peak_bytes": [2**30]}
    assert found["gpu_states"] == [GPU]


def test_a_busy_machine_is_reported_first_on_the_page_and_in_json() -> None:
    busy = replace(profile(loops=(a_loop(),)), waited=0.43)

    said = "threads of this process waited for a core for 43% of their time"
    assert said in dict(busy.machine())["the machine was busy with other work"]
    assert said in Parsed(page_html(busy)).text
    assert busy.to_json()["waited_for_other_programs"] == 0.43
    assert "busy with other work" not in page_html(replace(busy, waited=0.05))
