# SPDX-License-Identifier: Apache-2.0
"""`stage.yaml`: shipped files agree with the defaults, and what cannot be used stops the load by name."""

import re
import tracemalloc
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel, ValidationError

from triton_omni.core.settings import (
    EngineSettings,
    RequestLimits,
    SettingsError,
    StreamingPlan,
    TalkerEngineSettings,
    TalkerSettings,
    ThinkerSettings,
    Token2WavSettings,
    UnarySettings,
    load_settings,
)

ROOT = Path(__file__).parents[2]
REPOSITORY = ROOT / "model_repository"
SHIPPED = {
    "thinker": ThinkerSettings,
    "talker": TalkerSettings,
    "token2wav": Token2WavSettings,
    "qwen2_5_omni_unary": UnarySettings,
}

each_shipped = pytest.mark.parametrize(("model", "kind"), SHIPPED.items(), ids=SHIPPED)


@pytest.fixture
def load(tmp_path):
    def load_text(text, kind=ThinkerSettings):
        path = tmp_path / "stage.yaml"
        path.write_text(text, encoding="utf-8")
        return load_settings(path, kind)

    return load_text


def shipped_path(model):
    return REPOSITORY / model / "1" / "stage.yaml"


@each_shipped
def test_the_shipped_file_equals_the_defaults(model, kind):
    assert load_settings(shipped_path(model), kind) == kind()


@each_shipped
def test_the_shipped_file_names_every_key(model, kind):
    raw = yaml.safe_load(shipped_path(model).read_text())
    assert missing_keys(kind(), raw) == []


def missing_keys(settings: BaseModel, raw, prefix=""):
    missing = [prefix + name for name in type(settings).model_fields if name not in raw]
    for name, value in settings:
        if isinstance(value, BaseModel) and name in raw:
            missing += missing_keys(value, raw[name], f"{prefix}{name}.")
    return missing


@pytest.mark.parametrize("text", ["", "# only a comment\n", "{}"])
def test_an_empty_file_gives_the_defaults(load, text):
    assert load(text) == ThinkerSettings()


DECODING = re.findall(
    r"^ *\| ([\w.\- ]+) \| \d+ \(.*\) \| \d+ \(.*\) \| ([\d.]+) \| (\d+) \| (\d+) \|$",
    (ROOT / "docs" / "limits.md").read_text(encoding="utf-8"),
    re.MULTILINE,
)
"""Rows that `scripts/decode_cost.py` prints: codec, nanoseconds a pixel and a byte, seconds of the largest video."""


def test_the_table_of_decoding_has_the_codecs_that_matter():
    assert {"VP9", "HEVC", "AV1", "H.264"} <= {codec for codec, *_ in DECODING}


@pytest.mark.parametrize(("codec", "pixel_ns", "byte_ns", "largest_s"), DECODING)
def test_the_largest_video_is_decoded_twice_within_the_seconds(codec, pixel_ns, byte_ns, largest_s):
    """By the times of `docs/limits.md`, and a tenth more."""
    limits = RequestLimits()
    once_s = (limits.max_video_source_pixels * float(pixel_ns) + limits.max_media_bytes * float(byte_ns)) * 1e-9
    assert once_s == pytest.approx(float(largest_s), abs=1.5), codec
    assert 2 * 1.1 * once_s <= limits.max_decode_seconds, codec


def test_given_keys_replace_defaults_and_leave_the_others(load):
    settings = load("max_sessions: 3\nengine: {max_num_seqs: 5}\n")
    assert settings.max_sessions == 3
    assert settings.engine == EngineSettings(max_num_seqs=5)
    assert settings.max_new_tokens == ThinkerSettings().max_new_tokens


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("max_sessions: many", "max_sessions: expected an integer, found 'many'"),
        ("max_sessions: 3.5", "max_sessions: expected an integer, found 3.5"),
        ("max_sessions: 0", "max_sessions: 0 must be greater than 0"),
        ("max_sessions: 1025", "max_sessions: 1025 must be at most 1024"),
        (
            "engine: {max_model_len: 200, kv_cache_tokens: 199}",
            "engine: kv_cache_tokens 199 is below max_model_len 200: the longest sequence could never end",
        ),
        ("engine: {max_model_len: 63}", "engine.max_model_len: 63 must be at least 64"),
        ("timeout_s: soon", "timeout_s: expected a number, found 'soon'"),
        ("engine: {enforce_eager: maybe}", "engine.enforce_eager: expected true or false, found 'maybe'"),
        ("device: tpu", "device: 'tpu' must be 'auto', 'cpu' or 'cuda'"),
        ("engine: {fused_decode: maybe}", "engine.fused_decode: 'maybe' must be 'auto', true or false"),
        ("engine: 3", "engine: expected a mapping, found 3"),
        ("limits: {allowed_url_schemes: data}", "limits.allowed_url_schemes: expected a list, found 'data'"),
        ("limits: {allowed_url_schemes: [file]}", "limits.allowed_url_schemes.0: 'file' must be 'data'"),
        ("3: 4", "3: expected a string as key, found 3"),
        (
            "max_sessions: 0\nheartbeat_ms: 2000",
            "max_sessions: 0 must be greater than 0; heartbeat_ms: 2000 must be at most 1000",
        ),
    ],
)
def test_a_wrong_value_is_refused_with_its_key_and_limit(load, text, sentence):
    with pytest.raises(SettingsError) as refused:
        load(text)
    assert str(refused.value).endswith(f"stage.yaml: {sentence}")


@pytest.mark.parametrize(
    ("kind", "text", "sentence"),
    [
        (ThinkerSettings, "max_session: 3", "max_session: unknown key (did you mean max_sessions?)"),
        (ThinkerSettings, "engine: {max_num_seq: 3}", "engine.max_num_seq: unknown key (did you mean max_num_seqs?)"),
        (UnarySettings, "x: 3", "x: unknown key (known: max_requests, grpc_url)"),
        (
            Token2WavSettings,
            "plans: {balanced: {chunk_block: [1]}}",
            "plans.balanced.chunk_block: unknown key (did you mean chunk_blocks?)",
        ),
    ],
)
def test_an_unknown_key_is_refused_with_the_one_that_was_meant(load, kind, text, sentence):
    with pytest.raises(SettingsError) as refused:
        load(text, kind)
    assert str(refused.value).endswith(f"stage.yaml: {sentence}")


def test_compiled_and_eager_at_once_is_refused(load):
    with pytest.raises(SettingsError, match="torch_compile true and enforce_eager true exclude each other"):
        load("engine: {torch_compile: true, enforce_eager: true}")


@pytest.mark.parametrize("other", ["torch_compile", "enforce_eager", "deterministic"])
def test_decode_steps_are_fused_unless_another_way_to_run_was_chosen(load, other):
    assert load("engine: {}").engine.fuses_decode
    assert not load("engine: {fused_decode: false}").engine.fuses_decode
    assert not load(f"{{prefix_caching: false, engine: {{{other}: true}}}}").engine.fuses_decode


def test_part_of_the_talkers_engine_leaves_the_rest_as_it_is(load):
    assert load("engine: {max_num_seqs: 8}", TalkerSettings).engine == TalkerSettings().engine.model_copy(
        update={"max_num_seqs": 8}
    )


def test_fused_decode_steps_are_of_a_whole_thinker():
    with pytest.raises(ValueError, match="fused_decode true and tensor_parallel_size 2 exclude each other"):
        ThinkerSettings(engine=EngineSettings(fused_decode=True), tensor_parallel_size=2)


@pytest.mark.parametrize("other", ["torch_compile", "enforce_eager", "deterministic"])
def test_fused_decode_steps_are_of_one_way_to_run_alone(load, other):
    with pytest.raises(SettingsError, match=f"fused_decode true and {other} true exclude each other"):
        load(f"engine: {{fused_decode: true, {other}: true}}")


@pytest.mark.parametrize(
    ("engine", "tokens"),
    [
        (EngineSettings(), 32 * 4096),
        (TalkerEngineSettings(), 32 * (4096 + 2 + TalkerSettings().max_codes)),
        (EngineSettings(max_num_seqs=40), 40 * 4096),
        (EngineSettings(max_num_seqs=2), 32768),
        (EngineSettings(max_num_seqs=2, max_model_len=1000), 2000),
        (EngineSettings(kv_cache_tokens=40000), 40000),
    ],
)
def test_there_is_room_for_sequences_of_usual_length_or_one_of_the_longest(engine, tokens):
    assert engine.cached_tokens == tokens


def test_a_batch_larger_than_a_step_is_refused(load):
    with pytest.raises(SettingsError, match="max_num_batched_tokens 64 is below max_num_seqs 65"):
        load("engine: {max_num_batched_tokens: 64, max_num_seqs: 65}")


def test_a_plan_that_is_not_listed_is_refused(load):
    with pytest.raises(SettingsError, match=r"plan 'fast' is not in plans: \['balanced', 'low_latency', 'steady'\]"):
        load("plan: fast", Token2WavSettings)


def test_a_preset_that_is_not_listed_is_refused(load):
    with pytest.raises(SettingsError, match=r"preset 'best' is not in presets: \['fast', 'reference'\]"):
        load("preset: best", Token2WavSettings)


def test_a_preset_goes_before_the_diffusion_and_after_what_is_chosen(load):
    settings = load("{diffusion: {num_steps: 20, guidance_scale: 1}, preset: fast}", Token2WavSettings)
    assert settings.diffusion_of(None, {}).points == settings.diffusion_of("fast", {}).points == 4
    assert settings.diffusion_of("reference", {}).points == 20
    assert settings.diffusion_of("fast", {"num_steps": 7}).points == 7
    assert settings.diffusion_of("fast", {}).guidance == 1


def test_a_first_chunk_without_sound_is_refused(load):
    plan = "plans: {balanced: {chunk_blocks: [1], look_ahead_codes: 0, vocoder_context_frames: 24}}"
    with pytest.raises(SettingsError, match="vocoder_context_frames 24 leaves no sound of the first chunk"):
        load(plan, Token2WavSettings)
    assert StreamingPlan(chunk_blocks=(1,), look_ahead_codes=0, vocoder_context_frames=23)


def test_a_plan_without_chunks_is_refused(load):
    with pytest.raises(SettingsError, match=r"plans\.balanced\.chunk_blocks"):
        load("plans: {balanced: {chunk_blocks: []}}", Token2WavSettings)


@pytest.mark.parametrize(("text", "found"), [("[1, 2]", "list"), ("word", "str"), ("3", "int"), ("[]", "list")])
def test_a_file_that_is_no_mapping_is_refused(load, text, found):
    with pytest.raises(SettingsError, match=f"expected a mapping of settings, found {found}"):
        load(text)


@pytest.mark.parametrize(
    ("text", "where"),
    [("max_sessions: [", "line 1, column 16"), ("a: 1\nb: c: d", "line 2, column 5"), ("\t- x", "column 1")],
)
def test_a_file_that_is_no_yaml_is_refused_with_the_place(load, text, where):
    with pytest.raises(SettingsError, match=rf"stage\.yaml: cannot be read: .*{where}\)$"):
        load(text)


def test_a_file_with_control_characters_is_refused_in_one_line(load):
    with pytest.raises(SettingsError, match=r"stage\.yaml: cannot be read: [^\n]*#x0000[^\n]*$"):
        load("device: '\x00'")


def test_a_file_that_is_no_utf8_is_refused(tmp_path):
    path = tmp_path / "stage.yaml"
    path.write_bytes(b"device: \xff\xfe")
    with pytest.raises(SettingsError, match=r"stage\.yaml: cannot be read"):
        load_settings(path, ThinkerSettings)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(SettingsError, match=r"nowhere\.yaml: cannot be read"):
        load_settings(tmp_path / "nowhere.yaml", UnarySettings)


def test_a_file_cannot_make_python_objects(load):
    with pytest.raises(SettingsError, match="cannot be read"):
        load("device: !!python/object/apply:os.getcwd []")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("max_sessions: 4\nmax_sessions: 8", r"'max_sessions' is given twice \(line 2, column 1\)"),
        ("engine:\n  threads: 1\n  threads: 2", r"'threads' is given twice \(line 3, column 3\)"),
        ("limits: {max_messages: 1, max_messages: 1}", "'max_messages' is given twice"),
        ("device: 2026-13-45", "month"),
        ("max_sessions: " + "9" * 5000, "digits"),
        ("device: " + "[" * 5000, "nested too deeply"),
    ],
)
def test_what_yaml_takes_silently_or_fails_at_is_refused_with_a_reason(load, text, reason):
    with pytest.raises(SettingsError, match=rf"stage\.yaml: cannot be read: .*{reason}"):
        load(text)


@pytest.mark.parametrize("key", ["device", "nothing", "max_sessions"])
def test_a_value_that_aliases_make_of_astronomic_size_is_told_in_short(load, key):
    lists = [f"  - &a{level + 1} [{', '.join([f'*a{level}'] * 9)}]" for level in range(7)]
    tracemalloc.start()
    try:
        with pytest.raises(SettingsError, match=key):
            load("\n".join([f"{key}:", "  - &a0 [lol]", *lists]))
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_settings_do_not_change_after_load():
    with pytest.raises(ValidationError, match="frozen"):
        RequestLimits().max_messages = 3
