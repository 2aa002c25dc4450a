# SPDX-License-Identifier: Apache-2.0
"""`triton-omni bench --conversation`: what each turn sends, in which order, and what is told of each turn."""

from __future__ import annotations

import asyncio
import io
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from client_fakes import FakeTriton, chunk, failure, inputs_of, parameters_of, serve_grpc
from command_line import unframed
from media_samples import audio_file, image_file
from triton_omni_client import cli
from triton_omni_client.bench.conversations import Conversations, read_script
from triton_omni_client.bench.load import LoadRun
from triton_omni_client.bench.plots import write_plots
from triton_omni_client.bench.records import Load, RequestRecord
from triton_omni_client.bench.report import OF_A_TURN, Report, Run
from triton_omni_client.bench.tables import print_run
from triton_omni_client.bench.workload import PROMPTS, ScriptTurn, Workload
from triton_omni_client.conversation import Conversation
from triton_omni_client.errors import BadRequest, Internal
from triton_omni_client.messages import Delta, Media, Request, TextDelta

ROOT = Path(__file__).parents[2]
PHOTO = Media("image", image_file("jpeg"), "a.jpg")
SOUND = Media("audio", audio_file("wav"), "q.wav")
OTHER = Media("image", image_file("png"), "b.png")


class Silent:
    def started(self) -> None: ...

    def ended(self, record: RequestRecord) -> None: ...


class TestConversations:
    def test_each_turn_has_the_whole_history_as_the_librarys_conversation_sends_it(self) -> None:
        workload = Workload(media=(PHOTO, SOUND), turns=3, seed=5, system="Be brief.", voice="Ethan")
        conversations, library = Conversations(workload), Conversation(system="Be brief.", cache_salt="a")
        salts = set()
        for index in range(3, 6):
            turn = workload.turn(index)
            request = conversations.request(index)
            salts.add(request.cache_salt)
            expected = library.request(turn.text, turn.media, **workload.options(index))
            assert replace(request, cache_salt="a") == expected
            conversations.answered(index, f"reply {index}")
            library.add(turn.text, turn.media, f"reply {index}")
        assert len(salts) == 1

    def test_conversations_at_once_keep_their_own_turns(self) -> None:
        conversations = Conversations(Workload(prompts=("one", "two"), turns=2))
        for index in (0, 2):
            conversations.request(index)
        for index in (2, 0):
            conversations.answered(index, f"reply {index}")
        for index, first in ((1, 0), (3, 2)):
            assert [message["content"] for message in conversations.request(index).messages or ()][
                1
            ] == f"reply {first}"

    def test_a_turn_that_failed_is_missing_from_the_history(self) -> None:
        conversations = Conversations(Workload(turns=3))
        conversations.request(0)
        conversations.answered(0, "first")
        conversations.request(1)
        assert len(conversations.request(2).messages or ()) == 3

    def test_nothing_is_held_of_conversations_that_are_over(self) -> None:
        conversations = Conversations(Workload(turns=2))
        for index in range(8):
            conversations.request(index)
            conversations.answered(index, "reply")
        assert conversations._open == {}

    def test_prompts_begin_at_another_one_and_media_come_one_a_turn(self) -> None:
        workload = Workload(prompts=("a", "b", "c"), media=(PHOTO, SOUND), turns=3)
        turns = [workload.turn(index) for index in range(6)]
        assert [turn.text for turn in turns] == ["a", "b", "c", "b", "c", "a"]
        assert [list(turn.media) for turn in turns] == [[PHOTO], [SOUND], []] * 2

    def test_a_script_shorter_than_the_conversation_begins_anew(self) -> None:
        script = (ScriptTurn("a"), ScriptTurn("b", (PHOTO,)))
        workload = Workload(script=script, turns=3)
        assert [workload.turn(index) for index in range(4)] == [script[0], script[1], script[0], script[0]]


@pytest.mark.parametrize("listens", [False, True])
@pytest.mark.parametrize("places", [1, 3])
async def test_a_place_sends_a_turn_after_the_reply_to_the_one_before(places: int, listens: bool) -> None:
    events: list[tuple[str, int]] = []

    class Client:
        @asynccontextmanager
        async def stream(self, request: Request) -> AsyncIterator[AsyncIterator[Delta]]:
            number = int((request.request_id or "").removeprefix("bench-"))
            events.append(("asked", number))

            async def reply() -> AsyncIterator[Delta]:
                yield TextDelta("re")
                await asyncio.sleep(0)
                if number == 6:
                    raise Internal("broken")
                yield TextDelta(f"ply {number}")

            yield reply()
            events.append(("answered", number))

    told: dict[int, str] = {}
    conversations = Conversations(Workload(turns=4))

    def answered(index: int, reply: str) -> None:
        told[index] = reply
        conversations.answered(index, reply)

    run = LoadRun(Client(), conversations.request, Silent(), answered=answered)
    await run.closed_loop(places, requests=16, warm_up=4, listens=listens, turns=4)
    assert sorted(record.index for record in run.records) == list(range(20))
    assert {record.index for record in run.records if record.warm_up} == {0, 1, 2, 3}
    assert told == {index: f"reply {index}" for index in range(20) if index != 6}
    for index in set(range(20)) - {0, 4, 6, 7, 8, 12, 16}:
        assert events.index(("answered", index - 1)) < events.index(("asked", index))


class TestScripts:
    def test_turns_with_files_beside_the_script(self, tmp_path: Path) -> None:
        (tmp_path / "a.jpg").write_bytes(PHOTO.data)
        (tmp_path / "q.wav").write_bytes(SOUND.data)
        turns = [{"text": "what is it?", "image": ["a.jpg"]}, {"audio": ["q.wav"]}, {"text": "thanks"}]
        (tmp_path / "s.json").write_text(json.dumps(turns))
        first, second, third = read_script(tmp_path / "s.json")
        assert (first.text, [medium.data for medium in first.media]) == ("what is it?", [PHOTO.data])
        assert (second.text, [medium.kind for medium in second.media]) == ("", ["audio"])
        assert third == ScriptTurn("thanks")

    @pytest.mark.parametrize(
        ("text", "says"),
        [
            ("{", "cannot be read"),
            ("[]", "a list of at least one turn"),
            ('{"text": "a"}', "a list of at least one turn, found dict"),
            ('["a"]', "turn 1: must be an object, found str"),
            ('[{"text": "a"}, {"text": 3}]', "turn 2: text must be a string, found int"),
            ('[{"txt": "a"}]', "turn 1: unknown key 'txt' (known: text, image, audio, video)"),
            ("[{}]", "turn 1: has neither text nor media"),
            ('[{"image": "a.jpg"}]', 'turn 1: image must be a list of file names, found "a.jpg"'),
            ('[{"image": ["none.jpg"]}]', "none.jpg"),
        ],
    )
    def test_a_wrong_script_is_told_by_turn_and_field(self, tmp_path: Path, text: str, says: str) -> None:
        (tmp_path / "s.json").write_text(text)
        with pytest.raises(BadRequest, match=re.escape(says)):
            read_script(tmp_path / "s.json")


def _run(turns: int = 3, conversations: int = 20, load: Load | None = None) -> Run:
    """Turn t has a prompt of 100 (t + 1) tokens and its first text after t + 1 tenths of a second."""
    record = RequestRecord(index=0, start_s=0.0, sent_s=0.0, end_s=1.0)
    records = [
        replace(
            record,
            index=index,
            prompt_tokens=100 * (index % turns + 1),
            text_at_s=((index % turns + 1) / 10,),
            error="internal" if index == 1 else None,
        )
        for index in range(turns * conversations)
    ]
    return Run(load or Load("closed", 8), records, turns=turns)


class TestTurns:
    def test_figures_of_each_turn_are_its_own(self) -> None:
        (run,) = Report({}, {}, [_run()]).to_json()["runs"]
        assert [list(turn) for turn in run["turns"]] == [list(OF_A_TURN)] * 3
        assert [turn["completed"] for turn in run["turns"]] == [20, 19, 20]
        assert [turn["errors"] for turn in run["turns"]] == [{}, {"internal": 1}, {}]
        assert [turn["prompt_tokens"]["p50"] for turn in run["turns"]] == [100, 200, 300]
        assert [turn["time_to_first_text_s"]["p95"] for turn in run["turns"]] == [0.1, None, 0.3]
        (plain,) = Report({}, {}, [Run(Load("closed", 1), _run().records)]).to_json()["runs"]
        assert plain["turns"] == []

    def test_the_document_names_them(self) -> None:
        named = set(re.findall(r"`([a-z_0-9]+)`", (ROOT / "client" / "README.md").read_text(encoding="utf-8")))
        assert {"turns", *OF_A_TURN} <= named

    def test_a_table_has_a_line_a_turn(self) -> None:
        out = io.StringIO()
        print_run(Console(file=out, width=80), _run())
        lines = [line.split() for line in out.getvalue().splitlines() if line.split()[:1] == ["turn"]]
        assert lines == [
            ["turn", "1", "20", "0", "100", "100/100", "-/-"],
            ["turn", "2", "19", "1", "200", "200/-", "-/-"],
            ["turn", "3", "20", "0", "300", "300/300", "-/-"],
        ]

    def test_a_plot_for_each_load_that_was_heard(self, tmp_path: Path) -> None:
        pytest.importorskip("matplotlib")
        from triton_omni_client.bench.records import Chunk

        heard = [
            replace(run, records=[replace(record, chunks=(Chunk(0.3, 1.0),)) for record in run.records])
            for run in (_run(), _run(load=Load("closed", 2)))
        ]
        written = {path.name for path in write_plots([*heard, _run()], tmp_path / "b", "a GPU")}
        turns = {"b-time-to-first-audio-turns-2.png", "b-time-to-first-audio-turns-8.png"}
        assert written == turns | {"b-time-to-first-audio-closed.png", "b-real-time-factor-closed.png"}


def _bench(url: str, folder: Path, *arguments: str) -> Result:
    command = ["bench", "--url", url, "--metrics-url", "http://127.0.0.1:1/metrics", "-o", str(folder / "r.json")]
    return CliRunner().invoke(cli.app, [*command, *arguments])


def _messages(request: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(inputs_of(request)["messages"][0])
    return found


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "a.jpg").write_bytes(PHOTO.data)
    path = tmp_path / "s.json"
    path.write_text(json.dumps([{"text": "what is it?", "image": ["a.jpg"]}, {"text": "and now?"}]))
    return path


class TestCommand:
    def test_sounds_are_sent_while_they_are_spoken(self, tmp_path: Path) -> None:
        """A sound of over two seconds is hinted before its turn, which sends the same bytes; its salt is the same."""
        (tmp_path / "q.wav").write_bytes(audio_file("wav", seconds=2.2))
        (tmp_path / "a.jpg").write_bytes(PHOTO.data)
        turns = [{"text": "hello"}, {"text": "and?", "image": ["a.jpg"], "audio": ["q.wav"]}]
        (tmp_path / "s.json").write_text(json.dumps(turns))
        with serve_grpc(FakeTriton()) as server:
            result = _bench(
                server.url, tmp_path, "--concurrency", "1", "--requests", "1", "--warm-up", "0", "--conversation", "2",
                "--script", str(tmp_path / "s.json"), "--speak",
            )  # fmt: skip
            assert result.exit_code == 0, result.output
            first, hint, turn = server.requests
        (shown, spoken), (photo, whole) = inputs_of(hint)["media"], inputs_of(turn)["media"]
        assert shown == photo == PHOTO.data
        assert parameters_of(hint)["prefill_only"] is True
        assert "prefill_only" not in parameters_of(turn)
        assert len(spoken) < len(whole)
        assert whole[44 : len(spoken)] == spoken[44:]
        assert _messages(hint)[:-1] == _messages(turn)[:-1]
        assert _messages(hint)[-1]["content"] == _messages(turn)[-1]["content"][:2]
        assert parameters_of(turn)["audio_in_pieces"] is True
        assert len({parameters_of(request)["cache_salt"] for request in (first, hint, turn)}) == 1

    @pytest.mark.parametrize(
        ("sound", "says"),
        [
            (audio_file("wav", rate=24000), "q.wav: 1 channels of 16 bits at 24000 Hz; convert it to 1 channel"),
            (audio_file("wav", channels=2), "q.wav: 2 channels of 16 bits at 16000 Hz"),
            (audio_file("flac"), "q.wav: no WAV file of 16-bit samples"),
        ],
    )
    def test_other_sounds_are_refused_before_they_are_spoken(self, tmp_path: Path, sound: bytes, says: str) -> None:
        (tmp_path / "q.wav").write_bytes(sound)
        options = ["--conversation", "2", "--audio", str(tmp_path / "q.wav"), "--speak", "--check"]
        result = _bench("127.0.0.1:1", tmp_path, *options)
        assert result.exit_code == 2
        assert unframed(says) in unframed(result.output)

    def test_conversations_are_held_and_told_by_turn(self, tmp_path: Path, script: Path) -> None:
        with serve_grpc(FakeTriton()) as server:
            result = _bench(
                server.url, tmp_path, "--concurrency", "2", "--requests", "3", "--warm-up", "1", "--conversation", "2",
                "--script", str(script), "--listen", "--max-tokens", "9",
            )  # fmt: skip
            assert result.exit_code == 0, result.output
            assert len(server.requests) == 8
            by_seed = {parameters_of(request)["seed"]: request for request in server.requests}
            parameters = [parameters_of(request)["thinker"] for request in server.requests]
        asked = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what is it?"}]}
        for seed in range(0, 8, 2):
            assert _messages(by_seed[seed]) == [asked]
            *history, last = _messages(by_seed[seed + 1])
            assert history == [asked, {"role": "assistant", "content": "Hello, sea."}]
            assert last == {"role": "user", "content": [{"type": "text", "text": "and now?"}]}
            assert inputs_of(by_seed[seed + 1])["media"] == [PHOTO.data]
        assert parameters == [{"max_tokens": 9}] * 8
        report = json.loads((tmp_path / "r.json").read_text())
        (run,) = report["runs"]
        assert [turn["completed"] for turn in run["turns"]] == [3, 3]
        assert run["summary"]["completed"] == 6
        workload = report["workload"]
        assert (workload["turns"], workload["prompts_from"]) == (2, str(script))
        assert workload["script"] == [
            {"text": "what is it?", "media": [{"kind": "image", "bytes": len(PHOTO.data)}]},
            {"text": "and now?", "media": []},
        ]
        assert "by turn" in result.stdout
        assert (tmp_path / "r-time-to-first-audio-turns-2.png").exists()

    def test_a_failed_turn_does_not_end_its_conversation(self, tmp_path: Path) -> None:
        with serve_grpc(FakeTriton()) as server:
            usual = server.script

            def fails_in_turn_two(request: Any, context: Any) -> Any:
                if parameters_of(request)["seed"] % 3 == 1:
                    return iter([chunk(text="so far"), failure("broken [omni:internal;stage=thinker]")])
                return usual(request, context)

            server.script = fails_in_turn_two
            arguments = ["--concurrency", "1", "--requests", "2", "--warm-up", "0", "--conversation", "3"]
            assert _bench(server.url, tmp_path, *arguments, "--no-plots").exit_code == 0
            last = _messages(server.requests[2])
        assert [message["role"] for message in last] == ["user", "assistant", "user"]
        assert last[-1]["content"][-1]["text"] == PROMPTS[2]
        (run,) = json.loads((tmp_path / "r.json").read_text())["runs"]
        assert [turn["errors"] for turn in run["turns"]] == [{}, {"internal": 2}, {}]

    @pytest.mark.parametrize(
        ("arguments", "says"),
        [
            (["--conversation", "1"], "--conversation"),
            (["--conversation", "2", "--rate", "1"], "not with --rate"),
            (["--conversation", "2", "--crowds"], "not with --crowds"),
            (["--conversation", "2", "--write-perf-analyzer-input", "p.json"], "not with --write-perf-analyzer-input"),
            (["--conversation", "2", *["--image", "{folder}/a.jpg"] * 3], "3 media for 2 turns, which show one each"),
            (["--script", "{folder}/s.json"], "needs --conversation"),
            (["--speak"], "needs --conversation"),
            (["--conversation", "2", "--script", "{folder}/s.json", "--prompt-words", "3"], "not with --prompt-words"),
            (["--conversation", "2", "--script", "{folder}/s.json", "--image", "{folder}/a.jpg"], "not with --image"),
            (["--conversation", "2", "--script", "{folder}/a.jpg"], "cannot be read"),
        ],
    )
    def test_what_does_not_go_together_is_refused(
        self, tmp_path: Path, script: Path, arguments: list[str], says: str
    ) -> None:
        result = _bench("127.0.0.1:1", tmp_path, "--check", *(each.format(folder=tmp_path) for each in arguments))
        if "--write-perf-analyzer-input" in arguments:
            result = _bench("127.0.0.1:1", tmp_path, *arguments)
        assert result.exit_code == 2
        assert unframed(says) in unframed(result.stderr)
