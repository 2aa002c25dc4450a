# SPDX-License-Identifier: Apache-2.0
"""Processed media that are kept: found by the same caller with the same options alone, and never more than allowed."""

import json
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch

import media_samples as samples
from preprocessors import preprocessors
from triton_omni.core.errors import BadRequest, OmniError, TooLarge
from triton_omni.core.settings import RequestLimits
from triton_omni.request.chat import MediaPart
from triton_omni.request.media.decoders import Decoders
from triton_omni.request.media.types import Audio, Image, Video, VisionSizes, image_of
from triton_omni.request.parse import RawRequest
from triton_omni.session.engine import Features, ThinkerPlaced
from triton_omni.thinker.request_media import ENTRY_BYTES, MediaCache, MediaKey, Room

SIZES = VisionSizes()
PHOTO = samples.image_file("jpeg", 84, 56)
SOUND = samples.audio_file("wav", seconds=0.5)
FILM = samples.video_file("mp4", seconds=1.0, audio=True)
MEDIA = {"image": PHOTO, "audio": SOUND, "video": FILM}


def key(kind="image", data=PHOTO, sizes=SIZES, *, with_audio=False, salt="a"):
    return MediaKey.of(MediaPart(kind, data), sizes, with_audio=with_audio, salt=salt)


def sound(size, **known):
    return Audio(np.ones(480, np.float32), features=Features("features", size), **known)


def keys(*names):
    return [key("audio", name.encode()) for name in names]


def keep(cache, name, medium):
    cache.keep(*keys(name), medium)


def names_in(cache, names):
    return [name for name, medium in zip(names, cache.find(keys(*names)), strict=True) if medium is not None]


class TestKeys:
    @pytest.mark.parametrize("kind", ["image", "video"])
    @pytest.mark.parametrize("option", [{"fps": 1.0}, {"max_frames": 4}, {"max_pixels": 200_704}], ids=str)
    def test_options_of_pictures_keep_them_apart(self, kind, option):
        narrowed = SIZES.within(**{"fps": None, "max_frames": None, "max_pixels": None} | option)
        assert key(kind) != key(kind, sizes=narrowed)
        assert key("audio") == key("audio", sizes=narrowed)

    def test_a_video_that_is_heard_is_another(self):
        assert key("video") != key("video", with_audio=True)
        assert key("image") == key("image", with_audio=True)
        assert key("audio") == key("audio", with_audio=True)

    def test_bytes_kinds_and_salts_keep_media_apart(self):
        rates = [samples.audio_file("wav", seconds=0.5, rate=rate) for rate in (8000, 16000, 24000)]
        found = [key("audio", data) for data in rates] + [key(kind) for kind in ("image", "audio", "video")]
        found += [key(salt=salt) for salt in ("b", "", "c")]
        assert len(set(found)) == 9
        assert key(data=bytes(bytearray(PHOTO))) == key()

    def test_identifiers_are_as_far_apart_as_keys_and_tell_nothing(self):
        found = []
        for made in (key(), key(salt="b"), key("video"), key("video", with_audio=True), key()):
            film = Video(np.ones((2, 28, 56, 3), np.uint8), 2.0, sound(1))
            made.name(film)
            found += [film.features.identifier, film.audio.features.identifier]
        assert found[:2] == found[-2:]
        assert len(set(found)) == 8
        assert "secret" not in repr(key(salt="secret"))


class TestMediaCache:
    def test_the_least_recently_used_goes_when_bytes_lack(self):
        cache = MediaCache(3 * (ENTRY_BYTES + 1000))
        for name in "abc":
            keep(cache, name, sound(1000))
        assert cache.held_bytes == 3 * (ENTRY_BYTES + 1000)
        cache.find(keys("a"))
        keep(cache, "d", sound(1000))
        assert names_in(cache, "abcd") == ["a", "c", "d"]
        keep(cache, "e", sound(2000 + ENTRY_BYTES))
        assert names_in(cache, "abcde") == ["d", "e"]

    @pytest.mark.parametrize("limit", [0, 1, ENTRY_BYTES])
    def test_what_is_larger_than_the_cache_is_not_kept_and_drives_nothing_out(self, limit):
        cache = MediaCache(limit)
        keep(cache, "a", sound(1))
        assert (names_in(cache, "a"), cache.held_bytes) == ([], 0)

    def test_bytes_never_exceed_the_limit(self):
        cache, draw = MediaCache(100_000), random.Random(0)
        for number in range(500):
            keep(cache, f"{number % 60}", sound(draw.randrange(30_000)))
            assert cache.held_bytes <= 100_000
        assert cache.held_bytes > 50_000

    def test_content_is_dropped_and_its_shape_is_kept(self):
        cache = MediaCache(1 << 20)
        photo = replace(image_of(samples.picture(84, 56)), features=Features("photo", 9), cpu_seconds=0.25)
        film = Video(np.ones((2, 28, 56, 3), np.uint8), 2.0, sound(5), features=Features("film", 7), cpu_seconds=0.5)
        keep(cache, "photo", photo)
        keep(cache, "film", film)
        assert cache.held_bytes == 2 * ENTRY_BYTES + 9 + 7 + 5
        kept_photo, kept_film = cache.find(keys("photo", "film"))
        assert kept_photo.pixels.shape == (56, 84, 3)
        assert kept_film.frames.shape == film.frames.shape
        assert kept_film.audio.samples.shape == film.audio.samples.shape
        for held in (kept_photo.pixels, kept_film.frames, kept_film.audio.samples):
            assert set(held.strides) == {0}
        assert (kept_photo.features, kept_photo.cpu_seconds) == (photo.features, 0.25)
        assert (kept_film.features, kept_film.audio.features) == (film.features, film.audio.features)
        assert (kept_film.fps, kept_film.cpu_seconds) == (2.0, 0.5)

    def test_what_was_not_processed_is_not_kept(self):
        cache = MediaCache(1 << 20)
        keep(cache, "a", Audio(np.ones(480, np.float32)))
        assert names_in(cache, "a") == []


@pytest.fixture(scope="module")
def decoders():
    made = Decoders(RequestLimits(max_decode_seconds=10))
    yield made
    made.close()


class TestLimits:
    """A medium that is known counts as if it were decoded again."""

    @pytest.mark.parametrize("known_first", [True, False])
    def test_cpu_time(self, decoders, known_first):
        known = [sound(1, cpu_seconds=11.0), None if known_first else sound(1)]
        with pytest.raises(TooLarge, match=r"medium 1 \(audio\): decoding .* 10 seconds of CPU time"):
            decoders.decode([MediaPart("audio", SOUND)] * 2, with_audio=False, is_wanted=lambda: True, known=known)

    def test_room_of_a_prompt(self, decoders):
        """Decoding ends with the first medium that a prompt has no room for: what is held decoded is bounded."""
        part, options = MediaPart("video", FILM), {"with_audio": False, "is_wanted": lambda: True}
        (film,) = decoders.decode([part], SIZES, **options)
        broken = MediaPart("video", b"none")
        said = (
            "the prompt has 80 tokens up to medium 1 (video) without its text; this deployment's limit is 79 "
            "(max_model_len): send shorter, smaller or fewer media"
        )
        for known in ((), [film.outline, None, None], [None, film.outline, None], [film.outline, film.outline, None]):
            take = Room(lambda _film: 40, 79).taker()
            with pytest.raises(TooLarge) as refused:
                decoders.decode([part, part, broken], SIZES, known=known, take=take, **options)
            assert refused.value.message == said
        assert len(decoders.decode([part, part], SIZES, take=Room(lambda _film: 40, 80).taker(), **options)) == 2


@dataclass
class Engine:
    """Makes features of content, as the engine does: those that are filled in are used, and their shapes alone read."""

    decoded: int = 0
    prompts: list = field(default_factory=list)

    def media_tokens(self, media):
        return sum(len(items) for items in media.values())

    def prepare(self, prompt, *, max_tokens=1):
        for kind, media in prompt.multi_modal_data.items():
            for medium, slot in zip(media, prompt.features[kind], strict=True):
                if slot.item is None:
                    self.decoded += 1
                    slot.item, slot.size = np.asarray(medium).tobytes(), 1000
        self.prompts.append(prompt)
        return ThinkerPlaced(prompt.token_ids, torch.zeros(3, len(prompt.token_ids)).long(), prompt)

    def features(self):
        return [{kind: [slot.item for slot in slots] for kind, slots in at.features.items()} for at in self.prompts]


@pytest.fixture(scope="module")
def make(tiny_checkpoint):
    with preprocessors(tiny_checkpoint, Engine) as made:
        yield made


def asked(*kinds, media=None, **parameters):
    content = [{"type": kind} for kind in kinds]
    messages = json.dumps([{"role": "user", "content": content}]).encode()
    given = tuple(MEDIA[kind] for kind in kinds) if media is None else media
    return RawRequest(messages=messages, media=given, sampling_parameters=json.dumps(parameters).encode())


class TestPreprocessor:
    @pytest.mark.parametrize(
        ("kinds", "options", "count"),
        [
            (("image",), {}, 1),
            (("audio",), {}, 1),
            (("audio",), {"audio_in_pieces": True}, 1),
            (("video",), {}, 1),
            (("audio", "video", "image"), {"use_audio_in_video": True}, 4),
        ],
    )
    def test_a_medium_that_comes_again_is_not_processed_again(self, make, kinds, options, count):
        preprocessor, engine = make()
        first, again = (preprocessor.preprocess(asked(*kinds, **options, seed=1, cache_salt="a"), 0) for _ in range(2))
        assert engine.decoded == count
        missed, hit = engine.features()
        assert hit == missed
        assert again.placed.prompt_token_ids == first.placed.prompt_token_ids
        assert again.session == first.session
        miss, found = engine.prompts
        assert found.mm_processor_kwargs == miss.mm_processor_kwargs
        for kind, media in found.multi_modal_data.items():
            decoded = miss.multi_modal_data[kind]
            assert [np.asarray(at).shape for at in media] == [np.asarray(at).shape for at in decoded]

    def test_a_known_medium_and_a_new_one_keep_their_places(self, make):
        preprocessor, engine = make()
        other = samples.image_file("png", 56, 84, seed=3)
        preprocessor.preprocess(asked("image", cache_salt="a"), 0)
        preprocessor.preprocess(asked("image", "image", media=(other, PHOTO), cache_salt="a"), 0)
        preprocessor.preprocess(asked("image", "image", media=(other, PHOTO)), 0)
        alone, mixed, plain = engine.features()
        assert mixed == plain
        assert mixed["image"][1] == alone["image"][0]
        assert engine.decoded == 1 + 1 + 2

    def test_a_sound_in_pieces_shares_its_start_with_a_longer_one_and_nothing_with_a_whole_one(self, make):
        preprocessor, engine = make()
        sounds = [samples.audio_file("wav", seconds=seconds) for seconds in (2.02, 4.5, 4.5)]
        for sound, new in zip(sounds, (1, 2, 0), strict=True):
            before = engine.decoded
            preprocessor.preprocess(asked("audio", media=[sound], audio_in_pieces=True, cache_salt="a"), 0)
            assert engine.decoded - before == new
        one, three, again = ([slot.identifier for slot in prompt.features["audio"]] for prompt in engine.prompts)
        assert (three[:1], again) == (one, three)
        assert len(set(three)) == 3
        assert None not in three
        preprocessor.preprocess(asked("audio", media=sounds[2:], cache_salt="a"), 0)
        (whole,) = engine.prompts[-1].features["audio"]
        assert engine.decoded == 4
        assert whole.identifier not in three

    def test_of_a_sound_that_is_still_spoken_its_pieces_alone_are_kept(self, make):
        held = []
        for prefill_only in (True, False):
            preprocessor, _ = make(prefix_caching=True)
            sound = samples.audio_file("wav", seconds=4.5)
            options = {"audio_in_pieces": True, "prefill_only": prefill_only, "cache_salt": "a"}
            preprocessor.preprocess(asked("audio", "image", media=[sound, PHOTO], **options), 0)
            held.append(
                next(metric.value for metric in preprocessor.metrics() if metric.name == "omni_media_cache_bytes")
            )
        assert held == [4 * (1000 + ENTRY_BYTES), 4 * (1000 + ENTRY_BYTES) + 3 * 1000 + ENTRY_BYTES]

    @pytest.mark.parametrize(
        ("salts", "settings", "decoded"),
        [
            (("a", "a", "a"), {}, 1),
            (("a", "b", "a"), {}, 2),
            (("a", None, "b"), {}, 3),
            ((None, None, None), {}, 3),
            (("a", "a", "a"), {"media_cache_bytes": 0}, 3),
            (("a", "a", "a"), {"media_cache_bytes": ENTRY_BYTES}, 3),
        ],
    )
    def test_a_caller_shares_with_its_own_salt_alone(self, make, salts, settings, decoded):
        preprocessor, engine = make(**settings)
        for salt in salts:
            preprocessor.preprocess(asked("image", cache_salt=salt), 0)
        assert engine.decoded == decoded

    @pytest.mark.parametrize("settings", [{}, {"media_cache_bytes": 0}], ids=["kept", "off"])
    def test_media_of_one_caller_have_equal_identifiers_and_others_none(self, make, settings):
        preprocessor, engine = make(**settings)
        for salt in ("a", "a", "b", None):
            preprocessor.preprocess(asked("image", "video", use_audio_in_video=True, cache_salt=salt), 0)
        one, again, other, plain = (
            [slot.identifier for kind in ("image", "audio", "video") for slot in prompt.features[kind]]
            for prompt in engine.prompts
        )
        assert one == again
        assert len({*one, *other}) == 6
        assert plain == [None] * 3

    @pytest.mark.parametrize("options", [{"fps": 4}, {"max_frames": 2}, {"max_pixels": 128 * 28 * 28}], ids=str)
    def test_options_that_shape_a_video_make_it_another(self, make, options):
        preprocessor, engine = make()
        for given in ({}, options, {}, options):
            preprocessor.preprocess(asked("video", mm_processor_kwargs=given, cache_salt="a"), 0)
        assert engine.decoded == 2
        plain, shaped, *again = engine.features()
        assert again == [plain, shaped]

    @pytest.mark.parametrize(
        ("kind", "data"),
        [("image", PHOTO[:400]), ("audio", b"fLaC" * 9), ("video", FILM[:200]), ("image", SOUND)],
        ids=["cut jpeg", "damaged flac", "cut mp4", "a sound as an image"],
    )
    def test_a_damaged_medium_is_refused_alike_each_time_and_never_kept(self, make, kind, data):
        preprocessor, engine = make()
        told = []
        for salt in ("a", "a", None):
            with pytest.raises(BadRequest) as refused:
                preprocessor.preprocess(asked("image", kind, media=(PHOTO, data), cache_salt=salt), 0)
            told.append(refused.value.to_text())
        assert len(set(told)) == 1
        assert "medium 1" in told[0]
        assert (preprocessor._cache.held_bytes, engine.prompts) == (0, [])

    def test_nothing_is_kept_of_a_prompt_that_the_engine_refuses(self, make, monkeypatch):
        preprocessor, engine = make()

        def refuse(*_, **__):
            raise TooLarge("the prompt is too long")

        with monkeypatch.context() as patch:
            patch.setattr(engine, "prepare", refuse)
            for _ in range(2):
                with pytest.raises(OmniError, match="too long"):
                    preprocessor.preprocess(asked("image", cache_salt="a"), 0)
        assert preprocessor._cache.held_bytes == 0

    def test_requests_at_once_get_what_each_would_alone(self, make):
        preprocessor, _ = make(media_cache_bytes=2 * (ENTRY_BYTES + 1000))
        photos = [samples.image_file("png", 84, 56, seed=seed) for seed in range(3)]
        requests = [asked("image", media=(photos[n % 3],), cache_salt="ab"[n % 2]) for n in range(24)]
        alone = [preprocessor.preprocess(asked("image", media=(photo,)), 0).placed.engine_input for photo in photos]
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda request: preprocessor.preprocess(request, 0), requests))
        for number, preprocessed in enumerate(found):
            (slot,) = preprocessed.placed.engine_input.features["image"]
            assert slot.item == alone[number % 3].features["image"][0].item
        assert preprocessor._cache.held_bytes <= 2 * (ENTRY_BYTES + 1000)


def test_the_outline_of_a_picture_is_of_the_decoded_size():
    medium = image_of(samples.picture(56, 28))
    assert isinstance(medium, Image)
    assert medium.outline.pixels.shape == (28, 56, 3)
