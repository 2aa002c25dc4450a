# SPDX-License-Identifier: Apache-2.0
"""The talker's engine against HF's talker on the tiny checkpoint: greedy codes exact, whenever the rows come."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from reference.talker.rig import (
    DEVICE,
    GREEDY,
    SAMPLED,
    Case,
    Spoken,
    feed_one_by_one,
    speak,
    whole_replies,
)
from triton_omni.checkpoint.config import load_config
from triton_omni.session.engine import Sampling

# vLLM's import walks over every attribute of torch.distributed.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.distributed.reduce_op.*:FutureWarning")

# A library's order of summation depends on the processor; ids that are never drawn have logits beyond 100, so it counts
# by size.
LOGIT_RELATIVE_TOLERANCE = 1e-6 if DEVICE.type == "cpu" else 5e-6
LONG = Sampling(repetition_penalty=1.05, max_tokens=300)


def test_greedy_codes_equal_hf_one_by_one(engine, cases, expected):
    assert [speak(engine, [case], [GREEDY])[0] for case in cases] == expected


def test_greedy_codes_equal_hf_eight_at_once(engine, cases, expected):
    assert speak(engine, cases, [GREEDY] * len(cases)) == expected


@pytest.mark.parametrize(
    "penalties",
    [
        {"presence_penalty": 1.5},
        {"frequency_penalty": 0.6, "repetition_penalty": 1.0},
        {"presence_penalty": -1.0, "frequency_penalty": 2.0},
    ],
    ids=", ".join,
)
def test_codes_with_penalties_equal_hf_in_company(engine, cases, expected, talker, penalties):
    asked = [GREEDY, replace(GREEDY, **penalties)] * (len(cases) // 2)
    wanted = [talker.codes(case, sampling) for case, sampling in zip(cases, asked, strict=True)]
    assert speak(engine, cases, asked) == wanted
    assert wanted[::2] == expected[::2]
    assert wanted != expected


def test_rows_of_whole_replies_give_the_codes_of_hf_generate(engine, hf, talker):
    replies = whole_replies(hf)
    cases = [
        Case(r.thinker.rows, None, len(r.thinker.prompt_token_ids), r.talker.positions, r.talker.text_bos_id, None)
        for r in replies
    ]
    sampling = Sampling(repetition_penalty=1.05, max_tokens=300)
    found = speak(engine, cases, [sampling] * len(cases))
    assert [tuple(codes) for codes, _ in found] == [reply.talker.codes for reply in replies]
    assert [finish == "stop" for _, finish in found] == [r.talker.sampled != r.talker.codes for r in replies]
    assert len({reply.talker.codes for reply in replies}) == len(replies)


def test_the_reference_is_not_constant(expected):
    assert len({tuple(codes) for codes, _ in expected}) == len(expected)
    assert all(len(set(codes)) > len(codes) // 2 for codes, _ in expected)


def test_rows_that_come_one_by_one_give_the_same_codes(engine, cases, expected):
    spoken, left = Spoken(), {}
    for number, case in enumerate(cases):
        engine.open(f"s{number}", case.prompt, GREEDY)
        left[f"s{number}"] = case.rows
    feed_one_by_one(engine, left, spoken)
    spoken.drain(engine)
    assert [spoken.of(f"s{number}") for number in range(len(cases))] == expected


def test_a_code_is_given_as_soon_as_its_row_is_there(engine, cases, expected):
    case, spoken = cases[2], Spoken()
    engine.open("s", case.prompt, GREEDY)
    engine.feed("s", case.rows[: case.prompt_rows])
    spoken.drain(engine)
    assert spoken.codes == {}
    for count in range(1, 6):
        engine.feed("s", case.rows[case.prompt_rows + count - 1][None])
        spoken.drain(engine)
        assert spoken.codes["s"] == expected[2][0][:count]
        assert not engine.has_work()
    engine.abort("s")


def test_no_step_is_run_for_nothing_while_sequences_wait(engine, cases, monkeypatch):
    scheduled = []

    def watch(name):
        schedule = getattr(engine._core.scheduler, name, None)

        def watched(*args):
            output = schedule(*args)
            if output is not None:
                scheduled.append(output.total_num_scheduled_tokens)
            return output

        monkeypatch.setattr(engine._core.scheduler, name, watched, raising=False)

    watch("schedule")
    watch("schedule_further")
    spoken = Spoken()
    for number in (2, 4):
        engine.open(f"s{number}", cases[number].prompt, GREEDY)
        engine.feed(f"s{number}", cases[number].rows[: cases[number].prompt_rows])
    for count in range(4):
        for number in (2, 4):
            engine.feed(f"s{number}", cases[number].rows[cases[number].prompt_rows + count][None])
        spoken.drain(engine)
    # The prompts with the first reply row in one step (they fit), then both together a row.
    assert scheduled == [20 + 2 + 7 + 2, 2, 2, 2]
    assert {key: len(codes) for key, codes in spoken.codes.items()} == {"s2": 4, "s4": 4}
    for number in (2, 4):
        engine.abort(f"s{number}")


def test_sequences_that_wait_do_not_hold_up_the_others(engine, cases, expected):
    waiting, ready, spoken = cases[2], cases[3], Spoken()
    engine.open("waiting", waiting.prompt, GREEDY)
    engine.feed("waiting", waiting.rows[: waiting.prompt_rows + 2])
    engine.open("ready", ready.prompt, GREEDY)
    engine.feed("ready", ready.rows)
    engine.end("ready")
    spoken.drain(engine)
    assert spoken.of("ready") == expected[3]
    assert spoken.codes["waiting"] == expected[2][0][:2]
    engine.feed("waiting", waiting.rows[waiting.prompt_rows + 2 :])
    engine.end("waiting")
    assert spoken.drain(engine).of("waiting") == expected[2]


def test_a_prompt_longer_than_a_step_is_prefilled_in_parts(talker, voices, engine):
    case = talker.case(21, 150, 10, voices[0])
    assert speak(engine, [case], [GREEDY]) == [talker.codes(case, GREEDY)]


def test_media_positions_matter(engine, talker, cases, expected):
    """Positions of an image differ by axis; plain text positions give other codes."""
    case = cases[3]
    assert not torch.equal(case.positions[0], case.positions[1])
    flat = Case(case.rows, case.text_ids, case.prompt_rows, torch.arange(35).expand(3, -1), case.text_bos_id, None)
    assert speak(engine, [flat], [GREEDY]) != [expected[3]]


def test_the_voice_matters(engine, cases, voices, expected):
    case = cases[2]
    other = Case(case.rows, case.text_ids, case.prompt_rows, case.positions, voices[1], None)
    assert case.text_bos_id == voices[0]
    assert speak(engine, [other], [GREEDY]) != [expected[2]]


def test_prompt_logits_are_within_tolerance_of_hf(engine, talker, cases, monkeypatch):
    seen = []
    step = engine._core.model_executor.driver_worker.worker.model_runner.step
    adjust = step.adjust
    monkeypatch.setattr(step, "adjust", lambda logits, *rest: (seen.append(logits.clone()), adjust(logits, *rest))[1])
    speak(engine, [cases[3]], [Sampling(max_tokens=1)])
    torch.testing.assert_close(
        seen[0][0].cpu(), talker.prompt_logits(cases[3]), rtol=LOGIT_RELATIVE_TOLERANCE, atol=2e-5
    )


def test_a_seed_draws_the_same_alone_and_among_others(engine, cases):
    samplings = [Sampling(**{**SAMPLED.__dict__, "seed": seed}) for seed in range(8)]
    together = speak(engine, cases, samplings)
    backwards = speak(engine, cases[::-1], samplings[::-1])[::-1]
    alone = [speak(engine, [case], [sampling])[0] for case, sampling in zip(cases, samplings, strict=True)]
    assert together == alone == backwards


def test_seeds_differ_and_repeat(engine, cases):
    samplings = [Sampling(**{**SAMPLED.__dict__, "seed": seed}) for seed in (1, 2, 1, 3)]
    first, second, again, third = speak(engine, [cases[2]] * 4, samplings)
    assert first == again
    assert len({tuple(codes) for codes, _ in (first, second, third)}) == 3


def test_seeded_sequences_make_no_generators(engine, cases):
    engine.open("s", cases[2].prompt, SAMPLED)
    engine.feed("s", cases[2].rows)
    engine.step()
    batch = engine._core.model_executor.driver_worker.worker.model_runner.input_batch
    assert batch.num_reqs == 1
    assert not batch.generators
    engine.abort("s")
    Spoken().drain(engine)


def test_greedy_is_untouched_by_sampled_neighbours(engine, cases, expected):
    samplings = [GREEDY if number % 2 else SAMPLED for number in range(8)]
    assert speak(engine, cases, samplings)[1::2] == expected[1::2]


@pytest.mark.parametrize("filters", [{"top_k": 1}, {"min_p": 1.0}, {"top_p": 1e-6}])
def test_filters_that_leave_one_code_are_greedy(engine, cases, expected, filters):
    sampling = Sampling(temperature=1.5, repetition_penalty=1.05, max_tokens=40, seed=11, **filters)
    assert speak(engine, cases, [sampling] * len(cases)) == expected


def test_only_codes_of_the_codec_and_the_stop_ids_can_be_drawn(engine, tiny_checkpoint):
    config = load_config(tiny_checkpoint)
    runner = engine._core.model_executor.driver_worker.worker.model_runner
    logits = torch.zeros(1, config.talker.decoder.vocab_size, device=DEVICE)
    slots = torch.tensor([engine._rows.idle_slot], device=DEVICE)
    adjusted, _ = runner.step.adjust(logits, slots)
    drawable = set(adjusted[0].isfinite().nonzero().flatten().tolist())
    assert drawable == {*range(config.codec.largest_code + 1), *engine._ids.stops}


def test_no_sequence_stops_before_its_least_length_and_codes_equal_hf(engine, talker, cases):
    unbound = [talker.codes(case, LONG) for case in cases]
    assert sum(finish == "stop" for _, finish in unbound) > 1
    longer = [replace(LONG, min_tokens=min(len(codes) + 7 * number, 300)) for number, (codes, _) in enumerate(unbound)]
    expected = [talker.codes(case, sampling) for case, sampling in zip(cases, longer, strict=True)]
    assert speak(engine, cases, longer) == expected
    assert all(len(codes) >= sampling.min_tokens for (codes, _), sampling in zip(expected, longer, strict=True))
    assert expected != unbound


def test_a_least_length_holds_where_rows_come_one_by_one(engine, talker, cases):
    fixed = replace(LONG, min_tokens=120, max_tokens=120)
    case, spoken = cases[1], Spoken()
    engine.open("s", case.prompt, fixed)
    for row in case.rows:
        engine.feed("s", row[None])
        spoken.drain(engine)
    engine.end("s")
    assert spoken.drain(engine).of("s") == talker.codes(case, fixed)
    assert (len(spoken.codes["s"]), spoken.finish["s"]) == (120, "length")


def test_more_sequences_than_a_step_holds_take_turns(engine, cases, expected):
    assert speak(engine, cases * 2, [GREEDY] * 16) == expected * 2


def test_the_network_is_one_graph_for_the_compiler(engine, cases, expected, monkeypatch):
    network = engine._core.model_executor.driver_worker.worker.model_runner.get_model().model
    traced = torch.compile(network.forward, backend="eager", fullgraph=True, dynamic=True)
    monkeypatch.setattr(network, "forward", traced)
    assert speak(engine, cases, [GREEDY] * len(cases)) == expected
