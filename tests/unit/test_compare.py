# SPDX-License-Identifier: Apache-2.0
"""The comparison of variants, without a server: what a variant says, what it serves, what is printed."""

from __future__ import annotations

import importlib
import io
import json
import re
import subprocess
import sys
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
import typer
from rich.console import Console

from triton_omni.core.profile import load_profile

ROOT = Path(__file__).parents[2]


@pytest.fixture
def compare(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return lambda name: importlib.import_module(f"compare.{name}")


def test_a_variant_says_what_differs(compare):
    parse = compare("variants").parse_variant
    shipped, fused = parse("shipped"), parse('fused.2={"talker": {"engine": {"fused_decode": true}}, "replicas": 2}')
    assert (shipped.name, shipped.profile.changes, shipped.replicas, shipped.options) == ("shipped", {}, 1, ())
    assert (fused.name, fused.profile.changes, fused.replicas) == (
        "fused.2",
        {"talker": {"engine": {"fused_decode": True}}},
        2,
    )


def test_a_variant_s_stages_may_be_on_other_gpus(compare):
    parse = compare("variants").parse_variant
    assert parse('split={"gpus": "token2wav=1"}').placement == {"thinker": 0, "talker": 0, "token2wav": 1}
    assert parse("shipped").placement == {}


def test_a_variant_may_be_asked_for_more_than_others(compare):
    variant = compare("variants").parse_variant("""two={"replicas": 2, "bench": "--concurrency 64 --system ''"}""")
    assert (variant.profile.changes, variant.options) == ({}, ("--concurrency", "64", "--system", ""))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("../x", "'../x' is no name of letters"),
        ("", "'' is no name of letters"),
        ("x={", "x: Invalid JSON"),
        ('x={"tinker": {}}', "x: tinker: unknown key (did you mean thinker?)"),
        ('x={"profile": "smal"}', "x: profile: 'smal' is neither a profile (small) nor a file"),
        ('x={"replicas": 0}', "x: replicas: 0 must be at least 1"),
        ('x={"balancer": 2}', "x: balancer: "),
        ('x={"gpus": "token2wav"}', "x: gpus: token2wav: '' is no number of a GPU"),
        ('x={"checkout": "/nowhere"}', "x: checkout: /nowhere is no checkout of this repository"),
        ('x={"gpus": "token2wav=1", "replicas": 2}', "x: gpus: each of several replicas is on a GPU of its own"),
        ("""x={"bench": "--prompts 'a"}""", "x: bench: No closing quotation"),
    ],
)
def test_a_variant_that_says_nothing_sensible_is_refused(compare, text, sentence):
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}"):
        compare("variants").parse_variant(text)


def test_what_a_variant_changes_goes_before_what_its_profile_does(compare):
    variant = compare("variants").parse_variant('x={"profile": "small", "talker": {"engine": {"max_num_seqs": 4}}}')
    small = load_profile("small").changes
    assert variant.profile.source == "x"
    assert variant.profile.changes["thinker"] == small["thinker"]
    assert variant.profile.changes["talker"] == small["talker"] | {
        "engine": small["talker"]["engine"] | {"max_num_seqs": 4}
    }


def test_settings_that_a_stage_does_not_take_are_refused_before_anything_is_made(compare, tmp_path):
    chosen = [compare("variants").parse_variant(text) for text in ("shipped", 'x={"token2wav": {"solver": "euler"}}')]
    with pytest.raises(typer.BadParameter, match=r"^x over .*token2wav/1/stage\.yaml: solver: unknown key"):
        compare("__main__")._lay_out(chosen, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def run_of(mode, value, first_audio_s):
    return {
        "load": {"mode": mode, "value": value},
        "summary": {
            "time_to_first_text_s": {"p50": 0.02},
            "time_to_first_audio_s": {"p50": first_audio_s, "p95": None},
            "real_time_factor": {"p50": 0.123},
            "audio_seconds_per_s": 8.14,
            "underruns": 6,
            "completed": 4,
            "silence_per_request_s": {"mean": 0.256},
            "errors": {"overloaded": 2, "internal": 1},
        },
    }


def rows_of(table):
    out = io.StringIO()
    Console(file=out, width=80).print(table)
    return [line.split() for line in out.getvalue().splitlines() if "/-" in line]


def test_variants_stand_beside_each_other_load_by_load(compare):
    reports = {
        ("b", "bench"): {"runs": [run_of("closed", 8, 0.5), run_of("open", 2.5, 0.6), run_of("closed", 32, 0.7)]},
        ("a", "bench"): {"runs": [run_of("closed", 8, 0.4)]},
    }
    rows = rows_of(compare("table").compared(reports))
    assert [row[:4] for row in rows] == [
        ["8", "b", "20", "500/-"],
        ["8", "a", "20", "400/-"],
        ["32", "b", "20", "700/-"],
        ["2.5/s", "b", "20", "600/-"],
    ]
    assert rows[0][4:] == ["0.12", "8.1", "1.5", "0.26", "3"]


def test_every_figure_has_its_heading(compare):
    out = io.StringIO()
    Console(file=out, width=80).print(compare("table").compared({("a", "bench"): {"runs": [run_of("closed", 8, 0.4)]}}))
    first, second = (line.split() for line in out.getvalue().splitlines()[1:3])
    assert first == ["first", "first", "audio", "real-time", "speech", "under-", "silence"]
    assert second == ["load", "variant", "text", "ms", "ms,", "p50/p95", "factor", "s/s", "runs", "s", "errors"]


def test_named_loads_stand_in_the_order_in_which_they_were_asked(compare):
    runs = {"together": 0.5, "listeners": 0.4}
    reports = {
        (variant, load): {"runs": [run_of("closed", 32, seconds)]}
        for variant in ("a", "b")
        for load, seconds in runs.items()
    }
    assert [row[:3] for row in rows_of(compare("table").compared(reports))] == [
        ["together", "32", "a"],
        ["together", "32", "b"],
        ["listeners", "32", "a"],
        ["listeners", "32", "b"],
    ]


def figures_of(word_errors, apart=False):
    difference = {"value": 1, "low": 1, "high": 1, "count": 2, "apart": apart}
    return {"word_errors": {"value": word_errors, "low": None, "high": None, "count": 1, "difference": difference}}


@pytest.mark.parametrize("load", ["", ", second"])
def test_judged_variants_stand_below_each_other_setting_by_setting(compare, load):
    def report(*errors):
        return {"settings": [{"name": f"s{at}", "figures": figures_of(each, at > 0)} for at, each in enumerate(errors)]}

    reports = {("a", "first"): report(1, 2.5), ("b", "first"): report(3)} | (
        {("b", "second"): report(4)} if load else {}
    )
    out = io.StringIO()
    Console(file=out, width=160).print(compare("table").judged(reports))
    rows = [line.split("  ") for line in out.getvalue().splitlines() if ": s" in line]
    found = [(row[0].strip(), next(cell.strip() for cell in row[1:] if cell.strip())) for row in rows]
    first = ", first" if load else ""
    expected = [(f"a{first}: s0", "1"), (f"a{first}: s1", "2.5*"), (f"b{first}: s0", "3")]
    assert found == expected + ([("b, second: s0", "4")] if load else [])


def test_all_judgements_are_compared_with_the_first_of_their_load(compare, tmp_path, monkeypatch):
    running, program = compare("running"), compare("__main__")
    asked = []

    def run(command, **_options):
        asked.append(command[command.index("evaluate") :])
        folder = Path(command[command.index("-o") + 1])
        folder.mkdir(parents=True)
        (folder / "evaluate.json").write_text('{"settings": []}')
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(running.subprocess, "run", run)
    measured = program.Measured("evaluate")
    loads = [compare("variants").Load(name) for name in ("first", "second")]
    for variant in ("a", "b", "c"):
        measured.add(variant, loads, nullcontext(running.Served("host:1", "url", tmp_path / variant)))
    assert measured.failures == []
    references = [
        command[command.index("--reference") + 1 :][0] if "--reference" in command else "" for command in asked
    ]
    folders = [str(tmp_path / "a" / name) for name in ("first", "second")]
    assert references == ["", "", *folders, *folders]


HOLDER = [sys.executable, "-c", "import sys; print('held', flush=True); sys.stdin.read(); open(sys.argv[1], 'w')"]


def test_memory_is_held_back_until_the_servers_are_done(compare, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with compare("memory").free_memory(22.5, HOLDER):
        assert not (tmp_path / "22.5").exists()
    assert (tmp_path / "22.5").exists()


def test_memory_that_cannot_be_held_back_is_told_with_its_reason(compare, monkeypatch):
    memory = compare("memory")
    holder = [sys.executable, "-c", "import sys; print('a warning', file=sys.stderr); sys.exit('GPU 0 has none')"]
    with (
        pytest.raises(memory.MemoryNotHeld, match=r"^no GPU memory could be held back: GPU 0 has none$"),
        memory.free_memory(22, holder),
    ):
        pass
    # The program itself, on a machine without a GPU.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="no NVIDIA GPU is seen"):
        memory.hold(22)


@pytest.mark.parametrize(("free_gib", "held_gib"), [(139.5, 117.5), (22, 0)])
def test_all_but_the_wanted_memory_is_held(compare, monkeypatch, capsys, free_gib, held_gib):
    memory, sizes = compare("memory"), []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (int(free_gib * 2**30), 140 * 2**30))
    monkeypatch.setattr(torch, "zeros", lambda *_size, **_where: None)
    monkeypatch.setattr(torch, "empty", lambda size, **_where: sizes.append(size))
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    memory.hold(22)
    assert (sizes, capsys.readouterr().out) == ([int(held_gib * 2**30)] * 2, "held\n")


def test_a_gpu_with_less_memory_is_told(compare, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (20 * 2**30, 24 * 2**30))
    monkeypatch.setattr(torch, "zeros", lambda *_size, **_where: None)
    with pytest.raises(SystemExit, match=r"GPU 0 has 20\.0 GiB free, less than 22"):
        compare("memory").hold(22)


def run_with(errors=None, **mib):
    resources = {name.replace("__", "/"): {"mean": 0.0, "max": value * 1024} for name, value in mib.items()}
    run = run_of("closed", 1, 0.2)
    return {"runs": [run | {"resources": resources, "summary": run["summary"] | {"errors": errors or {}}}]}


def test_memory_is_the_most_of_all_loads_by_stage_and_together(compare):
    def stages(thinker, talker, token2wav, gpu):
        return run_with(
            stage__thinker__memory_mib=thinker,
            stage__talker__memory_mib=talker,
            stage__token2wav__memory_mib=token2wav,
            gpu__0__memory_mib=gpu,
        )

    reports = {
        ("small", "one"): stages(10, 4, 5, 137.25),
        ("small", "eight"): stages(11, 4, 5.5, 138),
        ("other", "one"): stages(1, 2, 3, 124),
    }
    found = compare("table").resident(reports, {"gpu/0/memory_mib": 117 * 1024.0})
    out = io.StringIO()
    Console(file=out, width=80).print(compare("table").resident_table(found))
    head, *rows = [line.split() for line in out.getvalue().splitlines() if line.strip(" ─")]
    assert head == ["GiB", "thinker", "talker", "token2wav", "other", "together"]
    assert rows == [
        ["small", "11.0", "4.0", "5.5", "0.5", "21.0"],
        ["other", "1.0", "2.0", "3.0", "1.0", "7.0"],
    ]


@pytest.mark.parametrize("may_fail", [True, False])
def test_under_a_limit_of_memory_no_request_may_fail(compare, tmp_path, monkeypatch, may_fail):
    program, load = compare("__main__"), compare("variants").Load("one")
    monkeypatch.setattr(program, "measure", lambda *_: run_with({"internal": 2}))
    measured = program.Measured("bench", may_fail=may_fail)
    measured.add("small", [load], nullcontext(compare("running").Served("host:1", "url", tmp_path)))
    assert measured.failures == ([] if may_fail else ["small, one: requests failed: {'internal': 2}"])
    assert list(measured.reports) == [("small", "one")]


def test_servers_start_only_where_the_rest_of_the_memory_is_held(compare, tmp_path, monkeypatch, capsys):
    program, memory, states = compare("__main__"), compare("memory"), []

    @contextmanager
    def held(gib):
        states.append(f"held {gib:g}")
        yield
        states.append("free")

    @contextmanager
    def served(variant, *_where, mps):
        states.append(f"{variant.name} starts")
        yield compare("running").Served("host:1", "url", tmp_path)

    monkeypatch.setattr(program, "free_memory", held)
    monkeypatch.setattr(program, "used_memory", lambda: {"gpu/0/memory_mib": 1024.0})
    monkeypatch.setattr(program, "serving", served)
    monkeypatch.setattr(program, "measure", lambda *_: run_with(gpu__0__memory_mib=21))
    monkeypatch.setattr(program, "_check", lambda *_: None)
    monkeypatch.setattr(program, "model_folder", Path)
    program.main(variant=['small={"profile": "small"}'], memory=22, out=tmp_path / "out", model="x")
    assert states == ["held 22", "small starts", "free"]
    assert ["small", "0.0", "0.0", "0.0", "20.0", "20.0"] in [
        line.split() for line in capsys.readouterr().out.splitlines()
    ]
    written = json.loads((tmp_path / "out" / "small" / "resident.json").read_text())
    assert written == {"resident": {"thinker": 0, "talker": 0, "token2wav": 0, "other": 20, "together": 20}}

    def refuses(_gib):
        raise memory.MemoryNotHeld("no GPU memory could be held back: none")

    monkeypatch.setattr(program, "free_memory", refuses)
    with pytest.raises(typer.Exit) as ended:
        program.main(variant=["shipped"], memory=22, out=tmp_path / "other", model="x")
    assert ended.value.exit_code == 1
    assert "error: no GPU memory could be held back: none" in capsys.readouterr().out
    assert not (tmp_path / "other").exists()


def test_a_limit_of_memory_is_nothing_to_be_judged(compare):
    with pytest.raises(typer.BadParameter, match="not with --evaluate"):
        compare("__main__").main(variant=["shipped"], evaluate=True, memory=22)


@pytest.mark.parametrize(
    ("variant", "url"),
    [
        ("one", "127.0.0.1:8001"),
        ('one={"balancer": true}', "envoy:1"),
        ('two={"replicas": 2}', "envoy:2"),
    ],
)
def test_envoy_goes_before_several_servers_and_before_one_that_asks_for_it(
    compare, tmp_path, monkeypatch, variant, url
):
    running = compare("running")

    @contextmanager
    def envoy(configuration, _folder):
        cluster = configuration["static_resources"]["clusters"][0]
        yield f"envoy:{len(cluster['load_assignment']['endpoints'][0]['lb_endpoints'])}", "operators"

    ready = {"grpc": "127.0.0.1:8001", "metrics": "127.0.0.1:8002"}
    monkeypatch.setattr(running, "server", lambda *_: nullcontext())
    monkeypatch.setattr(running, "wait_ready", lambda *_: ready)
    monkeypatch.setattr(running, "run_envoy", envoy)
    wanted = compare("variants").parse_variant(variant)
    with running.serving(wanted, tmp_path, tmp_path, mps=False) as served:
        assert (served.grpc_url, served.metrics_url) == (url, "http://127.0.0.1:8002/metrics")


def test_envoy_is_on_ports_of_its_own_before_all_servers(compare):
    found = compare("balancer").on_loopback(["127.0.0.1:8101", "127.0.0.1:8201"])
    resources = found["static_resources"]
    listening = [listener["address"]["socket_address"] for listener in resources["listeners"]]
    assert {address["address"] for address in listening} == {"127.0.0.1"}
    admin = found["admin"]["address"]["socket_address"]["port_value"]
    assert len({admin, *(address["port_value"] for address in listening)}) == 1 + len(listening)
    asked = {
        cluster["name"]: [
            endpoint["endpoint"]["address"]["socket_address"]
            for endpoint in cluster["load_assignment"]["endpoints"][0]["lb_endpoints"]
        ]
        for cluster in resources["clusters"]
    }
    assert asked["triton"] == [{"address": "127.0.0.1", "port_value": port} for port in (8101, 8201)]
    assert [address["port_value"] for address in asked["admin"]] == [admin]


def test_a_load_is_asked_between_what_all_are_and_what_its_variant_is(compare):
    load = compare("variants").parse_load("listeners=--listen --system ''")
    assert load.name == "listeners"
    assert load.beside(["--seed", "1"], ["--rate", "2"]).options == (
        *("--seed", "1"),
        *("--listen", "--system", ""),
        *("--rate", "2"),
    )


@pytest.mark.parametrize(
    ("text", "sentence"),
    [("a b=--listen", "'a b' is no name of letters"), ("a=--system '", "a: No closing quotation")],
)
def test_a_load_that_says_nothing_sensible_is_refused(compare, text, sentence):
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}"):
        compare("variants").parse_load(text)
