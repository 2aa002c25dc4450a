# SPDX-License-Identifier: Apache-2.0
"""The command `triton-omni evaluate` against a server that speaks in tones: faults of its replies miss their bounds."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc  # type: ignore[import-untyped]
import pytest

import triton_omni_client
from client_fakes import FakeTriton, chunk, parameters_of, serve_grpc
from command_line import unframed
from evaluations import BOUNDS, evaluate, report_of, small
from speaking_server import FAULTS, TASKS, SpeakingServer, ear
from triton_omni_client.evaluate import run

FEW = ["--sentences", "6", "--prompts", "0", "--pictures", "2", "--sounds", "2"]
NO_MEDIA = ["--sentences", "6", "--prompts", "0", "--pictures", "0", "--sounds", "0", "--no-plots"]
EULER = 'euler={"token2wav": {"solver": "euler"}}'
MISSED = {
    "another's reply": {"text_errors"},
    "another voice": {"right_voices"},
    "skipped words": {"skipped_words"},
    "repeated words": {"repeated_words"},
    "lost chunk": {"whole_replies"},
    "clicks": {"clicks"},
    "clipping": {"clipped"},
    "cut off": {"whole_replies"},
}


@pytest.fixture(autouse=True)
def tones_are_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "recogniser", ear)


@pytest.fixture
def server() -> Iterator[SpeakingServer]:
    fake = SpeakingServer()
    with serve_grpc(fake):
        yield fake


def figures(folder: Path, setting: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = report_of(folder)["settings"][setting]["figures"]
    return found


def test_a_sound_server_passes_the_small_evaluation(server: SpeakingServer, tmp_path: Path) -> None:
    result = small(server.url, tmp_path / "out")
    assert result.exit_code == 0, result.output
    report = report_of(tmp_path / "out")
    (setting,) = report["settings"]
    found = {name: figure["value"] for name, figure in setting["figures"].items()}
    perfect = {"text_errors": 0, "skipped_words": 0, "whole_replies": 100, "pictures": 100, "sounds": 100, "clipped": 0}
    assert {name: found[name] for name in perfect} == perfect
    assert len(report["bounds"]) == len(BOUNDS)
    assert len(setting["replies"]) == 40
    assert len(list((tmp_path / "out").glob("replies/served/*.wav"))) == 20


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_every_third_reply_misses_its_bounds(server: SpeakingServer, tmp_path: Path, fault: str) -> None:
    server.fault = fault
    result = small(server.url, tmp_path / "out")
    assert result.exit_code == 1, result.output
    missed = {
        bound["figure"]
        for bound in report_of(tmp_path / "out")["bounds"]
        if (bound["value"] > bound["limit"] if bound["is_most"] else bound["value"] < bound["limit"])
    }
    assert missed >= MISSED[fault]
    assert result.stderr.count("error: served: ") == len(missed)


def test_pictures_and_sounds_that_are_not_understood_miss_their_bounds(server: SpeakingServer, tmp_path: Path) -> None:
    server.tasks = TASKS.__class__("deaf and blind")
    result = small(server.url, tmp_path / "out")
    assert result.exit_code == 1
    assert "error: served: pictures understood: 0 %, wanted at least 80 %\n" in result.stderr
    assert "error: served: sounds understood: 0 %, wanted at least 60 %\n" in result.stderr


def test_a_refused_request_fails_the_evaluation(server: SpeakingServer, tmp_path: Path) -> None:
    server.fault = "refused"
    result = evaluate(server.url, tmp_path / "out", *NO_MEDIA, "--setting", "served")
    assert result.exit_code == 1
    assert "error: served: 2 requests failed; the first: internal: no room\n" in result.stderr
    found = figures(tmp_path / "out")
    assert (found["whole_replies"]["value"], found["whole_replies"]["count"]) == (pytest.approx(100 * 4 / 6), 6)
    assert found["word_errors"]["count"] == 4


def test_settings_are_compared_with_the_first(server: SpeakingServer, tmp_path: Path) -> None:
    settings = ["--setting", 'offline={"token2wav": {"mode": "offline"}}', "--setting", "served", "--setting", EULER]
    result = evaluate(server.url, tmp_path / "out", *NO_MEDIA, *settings)
    assert result.exit_code == 0, result.output
    offline, served, euler = (figures(tmp_path / "out", at) for at in range(3))
    assert "snr" not in offline
    assert "clicks" not in offline
    assert served["snr"]["value"] == 120
    assert 20 < euler["snr"]["value"] < 40
    assert served["reference_clicks"]["value"] == served["clicks"]["value"], "the same sound"
    assert served["mel_distance"]["value"] == 0 < euler["mel_distance"]["value"]
    assert offline["silence"]["difference"] is None
    assert euler["silence"]["difference"].keys() == {"value", "low", "high", "count", "apart"}
    assert served["silence"]["difference"]["value"] == 0
    assert "SNR" in result.stdout


def test_every_setting_asks_the_same_and_pictures_are_asked_once_for_each_text(
    server: SpeakingServer, tmp_path: Path
) -> None:
    settings = ["--setting", "served", "--setting", EULER, "--setting", 'cold={"thinker": {"temperature": 0}}']
    result = evaluate(server.url, tmp_path / "out", *FEW, *settings, "--seed", "5", "--seeds", "2", "--no-plots")
    assert result.exit_code == 0, result.output
    asked = [parameters_of(request) for request in server.requests]
    written = [each for each in asked if each["modalities"] == ["text"]]
    assert len(asked) - len(written) == 3 * 6 * 2 + 2  # two questions are spoken for the sounds
    assert len(written) == 2 * 4 * 2
    assert {each["seed"] for each in asked} == {5, 6}
    names = [[reply["name"] for reply in setting["replies"]] for setting in report_of(tmp_path / "out")["settings"]]
    assert names[0] == names[1] == names[2]
    assert len(set(names[0])) == len(names[0]) == 20


def test_voices_take_turns_and_change_with_the_seed(server: SpeakingServer, tmp_path: Path) -> None:
    evaluate(server.url, tmp_path / "out", *NO_MEDIA, "--setting", "served", "--seeds", "2")
    voices = [reply["voice"] for reply in report_of(tmp_path / "out")["settings"][0]["replies"]]
    assert voices == ["Chelsie", "Ethan"] * 3 + ["Ethan", "Chelsie"] * 3


def test_an_earlier_evaluation_is_a_reference(server: SpeakingServer, tmp_path: Path) -> None:
    assert evaluate(server.url, tmp_path / "a", *NO_MEDIA, "--setting", "served").exit_code == 0
    against = ["--reference", str(tmp_path / "a"), "--setting", "again", "--setting", EULER]
    assert evaluate(server.url, tmp_path / "b", *NO_MEDIA, *against).exit_code == 0
    again, euler = figures(tmp_path / "b"), figures(tmp_path / "b", 1)
    assert again["snr"]["value"] > 70  # of PCM16's rounding
    assert again["word_errors"]["difference"]["value"] == 0
    assert 20 < euler["snr"]["value"] < 40


def test_all_voices_swapped_are_seen_beside_an_earlier_evaluation(server: SpeakingServer, tmp_path: Path) -> None:
    """Alone they look consistent."""
    assert evaluate(server.url, tmp_path / "a", *NO_MEDIA, "--setting", "served").exit_code == 0
    server.swapped = True
    assert evaluate(server.url, tmp_path / "b", *NO_MEDIA, "--setting", "served").exit_code == 0
    against = ["--reference", str(tmp_path / "a"), "--setting", "served"]
    assert evaluate(server.url, tmp_path / "c", *NO_MEDIA, *against).exit_code == 0
    assert [figures(tmp_path / name)["right_voices"]["value"] for name in "abc"] == [100, 100, 0]


def test_replies_of_other_lengths_have_no_distance_and_say_so(server: SpeakingServer, tmp_path: Path) -> None:
    assert evaluate(server.url, tmp_path / "a", *NO_MEDIA, "--setting", "served").exit_code == 0
    for file in (tmp_path / "a" / "replies" / "served").glob("*.wav"):
        data = file.read_bytes()
        file.write_bytes(data[:40] + (len(data) - 144).to_bytes(4, "little") + data[44:-100])
    against = ["--reference", str(tmp_path / "a"), "--setting", "served"]
    result = evaluate(server.url, tmp_path / "b", *NO_MEDIA, *against, "--min-snr", "20")
    assert result.exit_code == 1
    assert "snr" not in figures(tmp_path / "b")
    assert any("no reply is as long as the reference's" in note for note in report_of(tmp_path / "b")["notes"])
    assert "error: served: SNR: not measured, wanted at least 20 dB\n" in result.stderr


def test_the_report_says_what_was_measured_with_what(server: SpeakingServer, tmp_path: Path) -> None:
    result = evaluate(server.url, tmp_path / "out", *FEW)
    assert result.exit_code == 0, result.output
    report = report_of(tmp_path / "out")
    assert (report["schema"], report["schema_version"]) == ("triton-omni-evaluate", 1)
    assert {"date", "command", "client_version", "python", "machine", "url", "server"} <= report["environment"].keys()
    plan = {"tasks": "mini", "sentences": 6, "prompts": 0, "pictures": 2, "sounds": 2, "seeds": [0]}
    assert report["plan"] == plan | {"voices": ["Chelsie", "Ethan"], "recogniser": "tones"}
    assert [(each["name"], each["options"]) for each in report["settings"]] == [
        ("offline", {"token2wav": {"mode": "offline"}}),
        ("served", {}),
    ]
    reply = report["settings"][1]["replies"][0]
    assert (reply["said"], reply["text"]) == (TASKS.sentences[0], TASKS.sentences[0])
    assert reply["heard"].startswith("once upon a time")
    assert (tmp_path / "out" / reply["file"]).stat().st_size > 44
    assert reply["boundaries"][0] == 2880
    for name in ("figures.png", "replies.png"):
        assert (tmp_path / "out" / name).read_bytes().startswith(b"\x89PNG")


def test_words_that_the_recogniser_does_not_know_are_noted(server: SpeakingServer, tmp_path: Path) -> None:
    server.said_instead = "Xqzt"
    evaluate(server.url, tmp_path / "out", *NO_MEDIA, "--setting", "served")
    (note,) = [note for note in report_of(tmp_path / "out")["notes"] if "unknown to the recogniser" in note]
    assert note.startswith("100.0 % of the replies' words")
    assert "xqzt" in note


def test_without_a_recogniser_speech_is_measured_but_not_read(server: SpeakingServer, tmp_path: Path) -> None:
    assert evaluate(server.url, tmp_path / "out", *NO_MEDIA, "--setting", "served", "--asr", "none").exit_code == 0
    found = figures(tmp_path / "out")
    assert "word_errors" not in found
    assert {"text_errors", "silence", "clicks", "right_voices"} <= found.keys()


def test_without_matplotlib_the_report_is_written_and_says_so(
    server: SpeakingServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = evaluate(server.url, tmp_path / "out", *NO_MEDIA[:-1])
    assert result.exit_code == 0, result.output
    assert "note: no plots: matplotlib is not installed" in result.stdout
    assert (tmp_path / "out" / "evaluate.json").exists()


def test_many_settings_stand_one_below_the_other(server: SpeakingServer, tmp_path: Path) -> None:
    settings = [part for at in range(4) for part in ("--setting", f"s{at}")]
    result = evaluate(server.url, tmp_path / "out", *NO_MEDIA, *settings)
    assert [line.split()[0] for line in result.stdout.splitlines() if line.split()[:1] in (["s0"], ["s3"])] == [
        "s0",
        "s3",
    ]


def test_an_unready_server_is_one_sentence(server: SpeakingServer, tmp_path: Path) -> None:
    server.is_ready = False
    result = evaluate(server.url, tmp_path / "out", *FEW)
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert result.stderr.startswith(f"error: no connection to {server.url}: ")
    assert not (tmp_path / "out").exists()


def test_a_server_that_goes_away_is_one_sentence(server: SpeakingServer, tmp_path: Path) -> None:
    usual, asked = server.script, itertools.count()

    def script(request: Any, context: Any) -> Iterator[Any]:
        if next(asked) >= 3:
            context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
        return usual(request, context)

    server.script = script
    result = evaluate(server.url, tmp_path / "out", *FEW)
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert result.stderr.startswith(f"error: no connection to {server.url}: ")


def test_a_server_that_tells_no_voices_is_asked_for_those_named(tmp_path: Path) -> None:
    fake = SpeakingServer()
    fake.configs = FakeTriton().configs
    with serve_grpc(fake):
        result = evaluate(fake.url, tmp_path / "out", *NO_MEDIA)
        assert (result.exit_code, "give them by --voices" in result.stderr) == (1, True)
        assert evaluate(fake.url, tmp_path / "out", *NO_MEDIA, "--voices", "Ethan, Chelsie").exit_code == 0
    assert report_of(tmp_path / "out")["plan"]["voices"] == ["Ethan", "Chelsie"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--setting", "a/b"], "'a/b' is no name of letters"),
        (["--setting", "a={"], "is not JSON"),
        (
            ["--setting", 'a={"vocoder": {}}'],
            'a: {"vocoder": {}} is no object of options of thinker, talker, token2wav',
        ),
        (["--setting", 'a={"talker": 1}'], 'a: {"talker": 1} is no object of options'),
        (["--setting", "a", "--setting", "a"], "two have the same name"),
        (["--tasks", "nowhere.json"], "does not exist"),
        (["--sentences", "-1"], "'-1' is not a whole number from 0 on"),
        (["--sentences", "0", "--prompts", "0", "--pictures", "0", "--sounds", "0"], "nothing is asked"),
        (["--seeds", "0"], "'0' is not a whole number from 1 to 100"),
        (["--max-word-errors", "many"], "'many' is not a number from 0 to 100"),
        (["--min-pictures", "101"], "'101' is not a number from 0 to 100"),
        (["--reference", "nowhere"], "is no evaluation that can be read"),
        (["-o", "."], "exists already; give another folder"),
        (["-o", __file__ + "/out"], f"{__file__} is no folder that can be written"),
    ],
)
@pytest.mark.parametrize("check", [[], ["--check"]])
def test_what_cannot_be_evaluated_is_refused_before_anything_is_asked(
    server: SpeakingServer, tmp_path: Path, options: list[str], says: str, check: list[str]
) -> None:
    result = evaluate(server.url, tmp_path / "out", *options, *check)
    assert result.exit_code == 2
    assert unframed(says) in unframed(result.stderr)
    assert server.requests == []
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("module", "options"),
    [("jiwer", []), ("pocketsphinx", []), ("soxr", []), ("PIL", ["--asr", "none"]), ("transformers", ["--asr", "x/y"])],
)
def test_a_missing_package_is_named(
    server: SpeakingServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, options: list[str]
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    result = evaluate(server.url, tmp_path / "out", *options)
    package = {"PIL": "pillow"}.get(module, module)
    assert (result.exit_code, server.requests) == (2, [])
    assert unframed(f"evaluate needs {package}: pip install {package}") in unframed(result.stderr)


@pytest.mark.parametrize("content", ["", "[]", "{}", json.dumps({"schema": "triton-omni-bench", "schema_version": 2})])
def test_a_reference_that_is_no_evaluation_is_refused(server: SpeakingServer, tmp_path: Path, content: str) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "evaluate.json").write_text(content)
    result = evaluate(server.url, tmp_path / "out", "--reference", str(tmp_path / "a"))
    assert (result.exit_code, server.requests) == (2, [])
    assert unframed("evaluate.json: is") in unframed(result.stderr)


def test_questions_that_the_server_speaks_are_word_for_word_or_noted(server: SpeakingServer, tmp_path: Path) -> None:
    only_sounds = ["--sentences", "0", "--prompts", "0", "--pictures", "0", "--sounds", "3", "--setting", "served"]
    assert evaluate(server.url, tmp_path / "a", *only_sounds, "--no-plots").exit_code == 0
    speaking = [
        parameters_of(request) for request in server.requests if "audio" in parameters_of(request)["modalities"]
    ]
    assert [each["thinker"] for each in speaking] == [{"temperature": 0}] * 3
    server.said_instead = "The sky"
    evaluate(server.url, tmp_path / "b", *only_sounds, "--no-plots")
    said = "3 of 3 questions were not spoken word for word, such as 'The sky'"
    assert [said in report_of(tmp_path / name)["notes"] for name in "ab"] == [False, True]


def test_an_interrupted_evaluation_exits_with_130(server: SpeakingServer, tmp_path: Path) -> None:
    begun, gone = threading.Event(), threading.Event()

    def script(_request: Any, context: Any) -> Iterator[Any]:
        context.add_callback(gone.set)
        yield chunk(text="Hi")
        begun.set()
        gone.wait(30)

    server.script = script
    command = [sys.executable, "-m", "triton_omni_client", "evaluate", "--url", server.url, "-o", str(tmp_path / "out")]
    environment = os.environ | {"PYTHONPATH": str(Path(triton_omni_client.__file__).parents[1])}
    with subprocess.Popen([*command, *FEW], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert begun.wait(60)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stdout, stderr) == (130, b"", b"")
    assert gone.wait(30)
    assert not (tmp_path / "out").exists()
