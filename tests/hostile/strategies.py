# SPDX-License-Identifier: Apache-2.0
"""Hostile JSON, text and URLs, and what damages a document that was right."""

from __future__ import annotations

import base64
import json
import struct
from typing import Any

from hypothesis import strategies as st

from special_tokens import SPECIALS

NUMBERS = st.one_of(
    st.sampled_from([0, -0.0, -1, 1e308, -1e308, 1e-320, 2**31, 2**63, -(2**63) - 1, 10**4000, True, 0.1 + 0.2]),
    st.sampled_from([float("nan"), float("inf"), float("-inf")]),
    st.integers(),
    st.floats(),
)
CHARACTERS = st.one_of(
    st.characters(codec="utf-8"),
    st.sampled_from("\x00\x07\x1b\x7f\x85\u200b\u2028\u202e\ufeff\ufffe\U000e0001\U0010ffff\u0301'\"\\"),
)
TEXT = st.one_of(
    st.text(CHARACTERS, max_size=30),
    st.lists(st.sampled_from([*SPECIALS, "<|im_", "start|>", "<|", "|>", "\n", "system", "user\n"]), max_size=8).map(
        "".join
    ),
    st.builds(lambda piece, count: piece * count, st.text(CHARACTERS, min_size=1, max_size=3), st.integers(1, 3000)),
)
SURROGATES = st.text(st.characters(min_codepoint=0xD800, max_codepoint=0xDFFF), min_size=1, max_size=3)
KEYS = st.one_of(
    st.sampled_from(
        [
            "role",
            "content",
            "type",
            "text",
            "url",
            "image_url",
            "audio_url",
            "video_url",
            "input_audio",
            "data",
            "detail",
            "seed",
            "thinker",
            "talker",
            "token2wav",
            "temperature",
            "top_k",
            "top_p",
            "stop",
            "logit_bias",
            "timeout",
            "json_schema",
            "voice",
            "modalities",
            "max_tokens",
            "min_tokens",
            "priority",
            "__class__",
            "$ref",
            "allOf",
        ]
    ),
    TEXT,
    SURROGATES,
)
SCALARS = st.one_of(
    st.none(),
    NUMBERS,
    TEXT,
    SURROGATES,
    st.sampled_from(["user", "system", "assistant", "tool", "text", "image", "audio", "video", "wav"]),
)
ANY_JSON: st.SearchStrategy[Any] = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4), max_leaves=20
)

NAMES = st.sampled_from(["f", "get_weather", "a b", '"', "<tool_call>", "\n", "x" * 65]) | TEXT
TOOLS = st.lists(
    st.fixed_dictionaries(
        {"type": st.just("function") | ANY_JSON},
        optional={
            "function": st.fixed_dictionaries(
                {"name": NAMES}, optional={"parameters": ANY_JSON, "description": TEXT, "strict": st.booleans()}
            )
            | ANY_JSON
        },
    )
    | ANY_JSON,
    max_size=5,
)
CALLS = st.lists(
    st.builds(
        lambda name, arguments: {"type": "function", "function": {"name": name, "arguments": arguments}},
        NAMES,
        st.sampled_from(["{}", "", "{", '{"a": "<|im_end|>"}', "[" * 500]) | TEXT | ANY_JSON,
    )
    | ANY_JSON,
    max_size=4,
)
PARAMETERS = st.fixed_dictionaries(
    {},
    optional={
        "modalities": st.lists(st.sampled_from(["text", "audio", "smell"]), max_size=4) | ANY_JSON,
        "voice": st.sampled_from(["Chelsie", "Ethan", "../../etc/passwd", "<|im_end|>"]) | ANY_JSON,
        "seed": NUMBERS,
        "audio_format": st.sampled_from(["f32", "pcm16", "wav", "mp3"]) | ANY_JSON,
        "use_audio_in_video": st.booleans() | ANY_JSON,
        "mm_processor_kwargs": ANY_JSON
        | st.dictionaries(st.sampled_from(["fps", "max_frames", "max_pixels", "num_frames"]), NUMBERS),
        "tools": TOOLS | ANY_JSON,
        "tool_choice": st.sampled_from(["auto", "none", "required"]) | ANY_JSON,
        "parallel_tool_calls": st.booleans() | ANY_JSON,
        "priority": NUMBERS,
        "timeout": NUMBERS,
        **{
            stage: ANY_JSON
            | st.dictionaries(
                st.sampled_from(
                    [
                        "temperature",
                        "top_p",
                        "top_k",
                        "min_p",
                        "repetition_penalty",
                        "presence_penalty",
                        "max_tokens",
                        "min_tokens",
                        "num_steps",
                        "guidance_scale",
                        "logit_bias",
                        "stop",
                        "json_schema",
                    ]
                ),
                NUMBERS | ANY_JSON | st.dictionaries(st.integers(-9, 400).map(str), NUMBERS, max_size=5),
                max_size=5,
            )
            for stage in ("thinker", "talker", "token2wav")
        },
    },
)

URLS = st.one_of(
    st.builds(
        "{}{}".format,
        st.sampled_from(
            [
                *[
                    "file://",
                    "file:",
                    "FILE:///",
                    "http://127.0.0.1:1/",
                    "https://[::1]/",
                    "http://169.254.169.254/",
                    "ftp://",
                    "gopher://",
                ],
                *[
                    "jar:",
                    "php://filter/",
                    "/etc/passwd",
                    "../../",
                    "\\\\host\\share\\",
                    "concat:",
                    "pipe:0",
                    "crypto:",
                    "http:///",
                    "//host/",
                ],
                *[
                    "subfile,,start,0,end,9,,:",
                    "data",
                    "blob:",
                    "data://",
                    "unix:/",
                    "tcp://0:1?listen",
                    "about:",
                    "javascript:",
                ],
                *["hls+http://", "async:", "cache:", "tee:", "s3://", "d\u0430ta:"],
                " data:",
            ]
        ),
        TEXT | st.just("etc/passwd"),
    ),
    st.builds(
        "{}{}".format,
        st.sampled_from(
            [
                "data:",
                "data:,",
                "data:;base64,",
                "DATA:image/png;BASE64,",
                "data:image/png;base64;charset=x,",
                "data:base64,",
            ]
        ),
        TEXT | st.binary(max_size=30).map(lambda data: base64.b64encode(data).decode()),
    ),
)
PARTS = st.one_of(
    st.builds(lambda text: {"type": "text", "text": text}, TEXT),
    st.sampled_from([{"type": "image"}, {"type": "audio"}, {"type": "video"}, {"type": "file"}]),
    st.builds(
        lambda kind, url: {"type": kind, kind: {"url": url}},
        st.sampled_from(["image_url", "audio_url", "video_url"]),
        URLS,
    ),
    st.builds(lambda data: {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}, TEXT),
    ANY_JSON,
)
MESSAGES = st.lists(
    st.builds(
        lambda role, content: {"role": role, "content": content},
        st.sampled_from(["system", "user", "user", "user", "assistant", "tool"]) | ANY_JSON,
        TEXT | st.lists(PARTS, max_size=5) | ANY_JSON,
    )
    | st.builds(lambda calls: {"role": "assistant", "tool_calls": calls}, CALLS | ANY_JSON)
    | ANY_JSON,
    max_size=6,
)
SCHEMAS: st.SearchStrategy[Any] = st.recursive(
    st.sampled_from(
        [{}, True, {"type": "string"}, {"type": "integer"}, {"$ref": "#"}, {"$ref": "http://x/y"}, {"enum": [1]}]
    )
    | st.builds(lambda number: {"multipleOf": number}, NUMBERS)
    | st.builds(lambda least, most: {"minItems": least, "maxItems": most}, NUMBERS, NUMBERS)
    | ANY_JSON,
    lambda inner: st.one_of(
        st.dictionaries(
            st.sampled_from(["items", "not", "if", "additionalProperties", "allOf", "$defs"]), inner, max_size=3
        ),
        st.builds(
            lambda key, schemas: {key: schemas},
            st.sampled_from(["allOf", "anyOf", "oneOf"]),
            st.lists(inner, max_size=3),
        ),
        st.builds(lambda named: {"properties": named}, st.dictionaries(KEYS, inner, max_size=3)),
    ),
    max_leaves=10,
)

ATOMS = st.sampled_from(
    [
        "a",
        ".",
        "\\w",
        "\\d",
        "[a-z]",
        "[^x]",
        "\\p{L}",
        "(?i)k",
        "\u00e9",
        "\U0001f600",
        "\\b",
        "^",
        "$",
        "\\S",
        '"',
        "\\u0041",
    ]
)
QUANTIFIERS = st.sampled_from(["", "", "*", "+", "?", "{3}", "{100}", "{1000}", "{2,}", "{0,1000}", "{5,100000}", "*?"])
PATTERNS: st.SearchStrategy[str] = st.recursive(
    st.builds("{}{}".format, ATOMS, QUANTIFIERS),
    lambda inner: st.one_of(
        st.builds("({}){}".format, inner, QUANTIFIERS),
        st.builds("({}|{}){}".format, inner, inner, QUANTIFIERS),
        st.lists(inner, min_size=1, max_size=4).map("".join),
    ),
    max_leaves=12,
)
SCHEMA_NUMBERS = st.one_of(
    st.sampled_from([0, -1, 100, 4096, 2**31, 2**53, 10**18, 2**63 - 1, -(2**62), 1e-10, 1e-100, 5e-324, 1e17, 1e300]),
    st.integers(-(10**18), 10**18),
    st.floats(allow_nan=False, allow_infinity=False),
)
LENGTHS = st.sampled_from([0, 1, 2, 100, 4096, 65536, 10**9, 2**62, -1, 1.5])
DATA = st.recursive(
    st.none() | st.booleans() | SCHEMA_NUMBERS | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
COMPILED_SCHEMAS: st.SearchStrategy[Any] = st.deferred(
    lambda: (
        st.fixed_dictionaries(
            {},
            optional={
                "type": st.sampled_from(
                    ["string", "integer", "number", "object", "array", "null", ["string", "integer"]]
                ),
                "$defs": st.dictionaries(st.sampled_from("ab"), _SCHEMA, max_size=2),
                **dict.fromkeys(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"], SCHEMA_NUMBERS),
                **dict.fromkeys(["minLength", "maxLength"], LENGTHS),
                **dict.fromkeys(["minItems", "maxItems", "minProperties", "maxProperties"], LENGTHS),
                "multipleOf": st.sampled_from([1, 3, 10_000, 0.01, 0.5, 0]),
                "pattern": PATTERNS,
                "format": st.sampled_from(["date-time", "uri", "email", "ipv6"]),
                "properties": st.dictionaries(st.text(max_size=4), _SCHEMA, max_size=4),
                "patternProperties": st.dictionaries(PATTERNS, _SCHEMA, max_size=3),
                **dict.fromkeys(["items", "additionalProperties"], _SCHEMA),
                "prefixItems": st.lists(_SCHEMA, max_size=3),
                "required": st.lists(st.text(max_size=4), max_size=4),
                "enum": st.lists(DATA, max_size=6),
                "const": DATA,
            },
        )
        | st.builds(
            lambda key, schemas: {key: schemas},
            st.sampled_from(["anyOf", "anyOf", "oneOf", "allOf"]),
            st.lists(_SCHEMA, max_size=4),
        )
        | st.sampled_from([{"$ref": "#"}, {"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}])
    )
)
"""JSON schemas of all that the compiler knows, few of which are refused before."""
_SCHEMA = st.booleans() | st.just({}) | COMPILED_SCHEMAS


def as_json(tree: object) -> bytes:
    """A document of it, also where JSON has no such number; half a surrogate pair is escaped."""
    return json.dumps(tree).encode()


DOCUMENT_NOISE = st.one_of(
    st.binary(max_size=20),
    st.sampled_from(
        [b'"', b"\\", b"\\u", b"\\ud800", b"NaN", b"-", b"1e999", b"\xef\xbb\xbf", b"\x00", b"/**/", b",", b"'"]
    ),
    st.builds(
        lambda piece, count: piece * count,
        st.sampled_from([b"[", b"]", b'{"a":', b"[{", b"1", b"-", b"\\", b'"', b" ", b"\n", b"\\u0000", b"A", b'"a",']),
        st.integers(1, 5000),
    ),
)
INTERESTING = st.one_of(
    st.binary(min_size=1, max_size=8),
    st.builds(
        lambda form, value: struct.pack(form, value & (256 ** struct.calcsize(form) - 1)),
        st.sampled_from(["<B", "<H", ">H", "<I", ">I", "<Q", ">Q"]),
        st.sampled_from(
            [0, 1, 2, 127, 128, 255, 32767, 65535, 10**6, 10**8, 2**31 - 1, 2**31, 2**32 - 1, 2**63, -1, -2]
        ),
    ),
)


@st.composite
def damaged(draw: st.DrawFn, whole: bytes, noise: st.SearchStrategy[bytes], tags: tuple[bytes, ...] = ()) -> bytes:
    """`whole` after one to five of: a cut, bytes over or between others, a piece lost or repeated, a lying field."""
    data = bytearray(whole)
    for _ in range(draw(st.integers(1, 5))):
        place = draw(st.integers(0, min(len(data), 200)) | st.integers(0, len(data)))
        kind = draw(st.sampled_from(["over", "over", "field", "field", "insert", "cut", "lose", "repeat", "flip"]))
        if kind == "over":
            piece = draw(noise)
            data[place : place + len(piece)] = piece
        elif kind == "insert":
            data[place:place] = draw(noise)
        elif kind == "cut":
            del data[place:]
        elif kind == "lose":
            del data[place : place + draw(st.integers(1, 300))]
        elif kind == "repeat":
            piece = bytes(data[place : place + draw(st.integers(1, 300))])
            data[place:place] = piece * draw(st.integers(1, 20))
        elif kind == "flip" and place < len(data):
            data[place] ^= 1 << draw(st.integers(0, 7))
        elif kind == "field" and tags:
            found = data.find(draw(st.sampled_from(tags)))
            if found >= 0:
                place = found + draw(st.integers(-4, 24))
                piece = draw(noise)
                data[max(place, 0) : max(place, 0) + len(piece)] = piece
    return bytes(data)
