# SPDX-License-Identifier: Apache-2.0
"""The training's own forward passes of DiT and vocoder, held equal to HF's; that their losses fall."""

import pytest
import torch
from training.discriminators import Discriminators, adversarial_losses, discriminator_loss
from training.dit import Batch, Flow, Speakers, new_dit
from training.parts import part
from training.schedule import Ema, Rate, adamw, descend, set_rate
from training.sizes import TOY
from training.snake import replace_activations, upsampled_snake
from training.spectral import SpectralLoss
from training.vocoder import new_vocoder, synthesize


@pytest.fixture(name="speakers")
def _speakers():
    generator = torch.Generator().manual_seed(0)
    cond, reference = torch.randn(3, 192, generator=generator), torch.randn(3, 50, 80, generator=generator)
    cond[-1], reference[-1] = 0, 0
    return Speakers(cond, reference)


def _batch(rows, generator):
    mel = torch.randn(rows, 48, 80, generator=generator)
    return Batch(mel, torch.randint(1, 60, (rows, 24), generator=generator), torch.arange(rows) % 3)


def test_the_flow_is_hfs_without_guidance(speakers):
    torch.manual_seed(1)
    dit = new_dit(TOY, torch.zeros(80)).eval()
    batch = _batch(2, torch.Generator().manual_seed(2))
    state, time = torch.randn(2, 48, 80), torch.tensor(0.3)
    wanted = dit(
        hidden_states=state,
        condition_vector=speakers.reference[batch.speaker],
        speaker_embedding=speakers.cond[batch.speaker].unsqueeze(1).expand(-1, 48, -1),
        quantized_code=batch.codes,
        time_step=time,
        apply_cfg=False,
    )
    found = Flow(dit, speakers, 48)(state, time.expand(2), batch)
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


def test_the_flow_learns_a_batch(speakers):
    torch.manual_seed(3)
    dit = new_dit(TOY, torch.zeros(80))
    flow, batch = Flow(dit, speakers, 48), _batch(4, torch.Generator().manual_seed(4))
    batch.mel.mul_(0.1).sub_(4)
    optimizer = adamw(dit.parameters())
    set_rate(optimizer, 3e-3)
    losses = []
    for _ in range(25):
        loss = flow.loss(batch)
        descend(optimizer, loss, 1.0)
        losses.append(float(loss.detach()))
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])


def test_attention_that_became_too_sharp_is_taken_back(speakers):
    torch.manual_seed(10)
    dit = new_dit(TOY, torch.zeros(80))
    flow, batch = Flow(dit, speakers, 48), _batch(4, torch.Generator().manual_seed(11))
    flow.loss(batch)
    usual = float(flow.penalty.detach())
    assert 0 < usual < 0.01
    with torch.no_grad():
        for layer in (dit.transformer_blocks[0].attn.to_q, dit.transformer_blocks[0].attn.to_k):
            layer.weight.mul_(20)
    optimizer = adamw(dit.parameters())
    set_rate(optimizer, 2e-2)
    penalties = []
    for _ in range(40):
        loss = flow.loss(batch)
        penalties.append(float(flow.penalty.detach()))
        descend(optimizer, loss + flow.penalty, 1.0)
    assert penalties[0] > 1000 * usual
    assert penalties[-1] < penalties[0] / 100


def test_the_vocoders_wave_is_hfs():
    torch.manual_seed(5)
    vocoder = new_vocoder(TOY).eval()
    mel = torch.randn(1, 80, 12) - 4
    found = synthesize(vocoder, mel)
    assert found.shape == (1, 12 * 240)
    torch.testing.assert_close(found[0].clamp(-1, 1), vocoder(mel), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("length", [7, 30, 241])
def test_activations_that_a_compiler_takes_are_hfs(length):
    torch.manual_seed(6)
    theirs, ours = part("vocoder", TOY), part("vocoder", TOY)
    ours.load_state_dict(theirs.state_dict())
    replace_activations(ours, upsampled_snake)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    x = torch.randn(2, 32, length)
    torch.testing.assert_close(
        ours.resblocks[0].activations[1](x), theirs.resblocks[0].activations[1](x), atol=1e-5, rtol=1e-5
    )


def test_spectral_losses_are_zero_for_equal_waves_and_grow_with_the_difference():
    wave = torch.randn(2, 4800, generator=torch.Generator().manual_seed(7)) * 0.1
    noise = torch.randn(2, 4800, generator=torch.Generator().manual_seed(8)) * 0.1
    distances = [sum(map(float, SpectralLoss()(wave + part * noise, wave))) for part in (0.0, 0.1, 1.0)]
    assert distances[0] < 1e-5 < distances[1] < distances[2]


def test_discriminators_learn_to_tell_noise_from_a_tone():
    torch.manual_seed(9)
    judges = Discriminators()
    tone = torch.sin(torch.arange(3840) * 0.1).expand(2, -1) * 0.3
    noise = torch.randn(2, 3840) * 0.3
    optimizer = adamw(judges.parameters(), betas=(0.8, 0.99))
    set_rate(optimizer, 2e-3)
    before = float(discriminator_loss(judges(tone), judges(noise)).detach())
    for _ in range(12):
        descend(optimizer, discriminator_loss(judges(tone), judges(noise)), 10.0)
    assert float(discriminator_loss(judges(tone), judges(noise)).detach()) < 0.7 * before
    fooled, matched = adversarial_losses(judges(tone), judges(noise))
    assert float(fooled.detach()) > 0 < float(matched.detach())


def test_a_gradient_that_is_not_finite_leaves_the_weights_finite():
    layer = torch.nn.Linear(2, 1)
    optimizer = adamw(layer.parameters())
    set_rate(optimizer, 0.1)
    for bad in (float("nan"), float("inf"), 1.0):
        descend(optimizer, layer(torch.tensor([[bad, 1.0]])).sum(), 1.0)
    assert all(bool(torch.isfinite(parameter).all()) for parameter in layer.parameters())


def test_the_rate_warms_up_holds_and_falls():
    rate = Rate(1.0, warm_steps=10, hold=0.5, floor=0.1)
    assert [rate.at(0, 0.0), rate.at(9, 0.0), rate.at(100, 0.4)] == [0.1, 1.0, 1.0]
    assert 0.1 < rate.at(100, 0.8) < 1.0
    assert rate.at(100, 1.0) == pytest.approx(0.1)


def test_the_average_of_weights_follows_them():
    layer = torch.nn.Linear(3, 3)
    ema = Ema(layer, 0.9)
    with torch.no_grad():
        layer.weight.fill_(2.0)
    for _ in range(80):
        ema.update()
    torch.testing.assert_close(ema.tensors["weight"], torch.full((3, 3), 2.0), atol=1e-2, rtol=0)
