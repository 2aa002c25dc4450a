# SPDX-License-Identifier: Apache-2.0
"""Sound of realtime sessions in every format and base64 of every kind: a tone keeps its length, pitch and level.

G.711 is written and read by libsndfile, while the gateway has FFmpeg's codecs.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import soundfile
from numpy.typing import NDArray

from client_fakes import FakeTriton, chunk, final, inputs_of
from gateway_fakes import RunningGateway
from media_samples import image_file
from realtime_client import WHOLE, talk
from realtime_memory import Asked, connected

HERTZ, LEVEL, SECONDS = 700, 0.25, 2
G711 = {"audio/pcmu": "ULAW", "audio/pcma": "ALAW"}
FORMATS: list[dict[str, Any]] = [
    *({"type": "audio/pcm", "rate": rate} for rate in (24_000, 16_000, 8000)),
    *({"type": law} for law in G711),
]
Samples = NDArray[np.float64]


def tone(rate: int) -> Samples:
    samples: Samples = LEVEL * np.sin(2 * np.pi * HERTZ / rate * np.arange(SECONDS * rate))
    return samples


def written(samples: Samples, sound_format: dict[str, Any]) -> bytes:
    """Samples in a format of a session."""
    file = io.BytesIO()
    subtype = G711.get(sound_format["type"], "PCM_16")
    soundfile.write(file, samples, rate_of(sound_format), format="RAW", subtype=subtype, endian="LITTLE")
    return file.getvalue()


def read(data: bytes, sound_format: dict[str, Any]) -> Samples:
    """Samples of bytes in a format of a session."""
    subtype = G711.get(sound_format["type"], "PCM_16")
    options = {"samplerate": rate_of(sound_format), "channels": 1, "format": "RAW", "subtype": subtype}
    samples: Samples = soundfile.read(io.BytesIO(data), endian="LITTLE", **options)[0]
    return samples


def rate_of(sound_format: dict[str, Any]) -> int:
    rate: int = sound_format.get("rate", 8000)
    return rate


def assert_is_tone(samples: Samples, rate: int) -> None:
    """The tone, as long and as loud as it was, and nothing else but the noise of 8 bits."""
    assert len(samples) == pytest.approx(SECONDS * rate, abs=rate // 500)
    middle = samples[rate // 4 :][:rate]
    spectrum = np.abs(np.fft.rfft(middle)) * 2 / rate
    assert spectrum.argmax() == HERTZ
    assert spectrum[HERTZ] == pytest.approx(LEVEL, rel=0.02)
    assert np.std(middle) == pytest.approx(LEVEL / np.sqrt(2), rel=0.02)


@pytest.mark.parametrize("sound_format", FORMATS, ids=str)
async def test_an_item_s_sound_comes_back_as_it_was_sent(sound_format: dict[str, Any]) -> None:
    """However it became an item; in memory, since OpenAI's types know no PCM of other rates than 24 kHz."""
    sent = base64.b64encode(written(tone(rate_of(sound_format)), sound_format)).decode()
    given = {"type": "message", "role": "user", "content": [{"type": "input_audio", "audio": sent}]}
    async with connected(Asked(), format=sound_format, turn_detection=None) as session:
        session.send("input_audio_buffer.append", audio=sent)
        appended = await session.asked("input_audio_buffer.commit", "conversation.item.done")
        created = await session.asked("conversation.item.create", "conversation.item.done", item=given)
        for item_id in (appended["item"]["id"], created["item"]["id"]):
            told = await session.asked("conversation.item.retrieve", "conversation.item.retrieved", item_id=item_id)
            sound = base64.b64decode(told["item"]["content"][0]["audio"])
            assert_is_tone(read(sound, sound_format), rate_of(sound_format))


def in_lines(data: bytes) -> str:
    """Base64 with line breaks, as many programs write it."""
    return base64.encodebytes(data).decode().replace("\n", "\r\n")


@pytest.mark.parametrize("begin", ["", "data:audio/pcm;base64,"])
async def test_sound_may_have_line_breaks_and_be_a_data_uri(begin: str) -> None:
    sent = begin + in_lines(written(tone(24_000), FORMATS[0]))
    given = {"type": "message", "role": "user", "content": [{"type": "input_audio", "audio": sent}]}
    async with connected(Asked(), turn_detection=None) as session:
        session.send("input_audio_buffer.append", audio=sent)
        appended = await session.asked("input_audio_buffer.commit", "conversation.item.done")
        created = await session.asked("conversation.item.create", "conversation.item.done", item=given)
        for item_id in (appended["item"]["id"], created["item"]["id"]):
            told = await session.asked("conversation.item.retrieve", "conversation.item.retrieved", item_id=item_id)
            assert_is_tone(read(base64.b64decode(told["item"]["content"][0]["audio"]), FORMATS[0]), 24_000)


async def test_a_picture_may_have_line_breaks() -> None:
    picture = image_file("png")
    parts = [{"type": "input_image", "image_url": f"data:image/png;base64,{in_lines(picture)}"}]
    given = {"type": "message", "role": "user", "content": parts}
    async with connected(Asked()) as session:
        item_id = (await session.asked("conversation.item.create", "conversation.item.done", item=given))["item"]["id"]
        told = await session.asked("conversation.item.retrieve", "conversation.item.retrieved", item_id=item_id)
        url = told["item"]["content"][0]["image_url"]
    assert url == f"data:image/png;base64,{base64.b64encode(picture).decode()}"


@pytest.mark.parametrize("kind", G711)
async def test_a_telephone_s_sound_goes_both_ways(triton: FakeTriton, gateway: RunningGateway, kind: str) -> None:
    def humming(_request: Any, _context: Any) -> Iterator[Any]:
        for part in np.array_split(tone(24_000).astype(np.float32), 9):
            yield chunk(audio=part)
        yield chunk(info=WHOLE)
        yield final()

    triton.script, formats = humming, {"format": {"type": kind}}
    async with talk(gateway.base, audio={"input": {**formats, "turn_detection": None}, "output": formats}) as session:
        sent = written(tone(8000), formats["format"])
        for begin in range(0, len(sent), 1111):
            part = base64.b64encode(sent[begin : begin + 1111]).decode()
            await session.send("input_audio_buffer.append", audio=part)
        await session.asked("input_audio_buffer.commit", "conversation.item.done")
        await session.asked("response.create", "response.done")
        assert_is_tone(read(session.heard(), formats["format"]), 8000)
    heard, rate = soundfile.read(io.BytesIO(inputs_of(triton.requests[-1])["media"][0]))
    assert rate == 16_000
    assert_is_tone(heard, rate)
