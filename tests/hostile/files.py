# SPDX-License-Identifier: Apache-2.0
"""Small true files of every format and its variants, to be damaged; and files that cost far more than their bytes."""

from __future__ import annotations

import functools
import io
import struct
import zlib
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

import av
import numpy as np
import soundfile
from PIL import Image

import media_samples as samples

TAGS: Mapping[str, tuple[bytes, ...]] = {
    "audio": tuple(b"RIFF fmt data fact fLaC OggS vorbis OpusHead ID3 Xing Info".split()),
    "image": (
        *b"IHDR IDAT PLTE tRNS iCCP eXIf acTL fcTL Exif VP8X VP8L VP8 ANMF ALPH EXIF".split(),
        *(b"\xff" + marker for marker in (b"\xc0", b"\xc2", b"\xc4", b"\xda", b"\xdb")),
    ),
    "video": (
        *b"ftyp moov mvhd tkhd elst mdhd hdlr stsd avc1 avcC mp4a esds stts ctts stsc stsz stco moof tfhd trun".split(),
        *b"trex mdat webm V_VP A_OPUS OpusHead".split(),
        *(b"\x16\x54\xae\x6b", b"\x1f\x43\xb6\x75", b"\x2a\xd7\xb1", b"\x23\xe3\x83", b"\x49\x83\x42"),
    ),
}
"""Places in each format that hold its figures."""


def _sound(container: str, subtype: str, seconds: float = 0.1, rate: int = 16000, channels: int = 1) -> bytes:
    out = io.BytesIO()
    soundfile.write(out, samples.tone(seconds, rate, channels), rate, format=container, subtype=subtype)
    return out.getvalue()


def _with_exif(kind: str) -> bytes:
    exif = Image.Exif()
    exif[0x0112], exif[0x010F] = 6, "maker"
    exif.get_ifd(0x8769)[0x9003] = "2024:01:01 00:00:00"
    return samples.image_file(kind, 40, 30, exif=exif)


def _animation(kind: str) -> bytes:
    frames = [Image.fromarray(samples.picture(40, 30, seed)) for seed in range(3)]
    return samples.encode_image(frames[0], kind, save_all=True, append_images=frames[1:], duration=40)


def fragmented_mp4() -> bytes:
    """H.264 in fragments, as a phone streams it."""
    out = io.BytesIO()
    options = {"movflags": "frag_keyframe+empty_moov+default_base_moof"}
    with av.open(out, mode="w", format="mp4", options=options) as container:
        stream = container.add_stream("libx264", rate=8)
        stream.width, stream.height, stream.pix_fmt, stream.thread_count = 64, 48, "yuv420p", 1
        for index in range(8):
            frame = av.VideoFrame.from_ndarray(samples.picture(seed=index), format="rgb24")
            frame.pts, frame.time_base = index, Fraction(1, 8)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return out.getvalue()


@functools.cache
def true_files(kind: str) -> Mapping[str, bytes]:
    """By name, files that the server takes as that kind of medium."""
    return {name: make() for name, make in _TRUE[kind].items()}


_TRUE: Mapping[str, Mapping[str, Callable[[], bytes]]] = {
    "audio": {
        "wav": lambda: _sound("WAV", "PCM_16"),
        "wav float stereo": lambda: _sound("WAV", "FLOAT", channels=2),
        "wav adpcm": lambda: _sound("WAV", "MS_ADPCM"),
        "wav gsm": lambda: _sound("WAV", "GSM610"),
        "wav extensible": lambda: _sound("WAVEX", "PCM_24", channels=2),
        "flac": lambda: _sound("FLAC", "PCM_16"),
        "vorbis": lambda: _sound("OGG", "VORBIS"),
        "opus": lambda: _sound("OGG", "OPUS"),
        "mp3": lambda: _sound("MP3", "MPEG_LAYER_III"),
        "mp3 with a tag": lambda: b"ID3\x04\0\0\0\0\0\x0aTIT2\0\0\0\0\0\0" + _sound("MP3", "MPEG_LAYER_III"),
    },
    "image": {
        "png": lambda: samples.image_file("png", 40, 30),
        "png palette": lambda: samples.encode_image(
            Image.fromarray(samples.picture(40, 30)).quantize(16), "png", transparency=0
        ),
        "png 16 bit": lambda: samples.encode_image(
            Image.fromarray(np.arange(1200, dtype=np.uint16).reshape(30, 40)), "png"
        ),
        "png exif": lambda: _with_exif("png"),
        "png animated": lambda: _animation("png"),
        "png profile": lambda: samples.image_file("png", 40, 30, icc_profile=b"profile" * 20),
        "jpeg": lambda: samples.image_file("jpeg", 40, 30),
        "jpeg progressive": lambda: samples.image_file("jpeg", 40, 30, progressive=True),
        "jpeg exif": lambda: _with_exif("jpeg"),
        "jpeg cmyk": lambda: samples.encode_image(Image.new("CMYK", (40, 30), (9, 99, 5, 7)), "jpeg"),
        "webp": lambda: samples.image_file("webp", 40, 30),
        "webp lossless": lambda: samples.image_file("webp", 40, 30, lossless=True),
        "webp exif": lambda: _with_exif("webp"),
        "webp animated": lambda: _animation("webp"),
    },
    "video": {
        "mp4": lambda: samples.video_file("mp4"),
        "mp4 sound": lambda: samples.video_file("mp4", audio=True, seconds=0.5),
        "mp4 fragments": fragmented_mp4,
        "webm": lambda: samples.video_file("webm"),
        "webm sound": lambda: samples.video_file("webm", audio=True, seconds=0.5),
    },
}


def png_chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def png_of_size(width: int, height: int) -> bytes:
    """A png that claims a size, and whose pixels are all black."""
    packed = zlib.compress(bytes(4 << 20), 9)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", header) + png_chunk(b"IDAT", packed) + png_chunk(b"IEND", b"")


def png_with(chunk: bytes, count: int) -> bytes:
    """A small png with the same chunk `count` times after its header."""
    whole = samples.image_file("png", 40, 30)
    return whole[:33] + chunk * count + whole[33:]


def jpeg_with(bytes_between: bytes, count: int) -> bytes:
    """A small jpeg with the same bytes `count` times after its first marker."""
    whole = samples.image_file("jpeg", 40, 30)
    return whole[:2] + bytes_between * count + whole[2:]


def jpeg_of_scans(count: int, side: int) -> bytes:
    """A black progressive jpeg of side x side pixels, its last scan repeated."""
    whole = samples.encode_image(Image.new("L", (side, side)), "jpeg", progressive=True)
    scan = whole[whole.rindex(b"\xff\xda") : -2]
    return whole[:-2] + scan * count + whole[-2:]


def webp_of_size(kind: bytes, width: int, height: int) -> bytes:
    """A webp, simple (`VP8 `, `VP8L`) or with a canvas (`VP8X`), whose header claims a size."""
    data = bytearray(samples.image_file("webp", 40, 30, lossless=kind != b"VP8 "))
    if kind == b"VP8 ":
        data[26:30] = struct.pack("<HH", width, height)
    elif kind == b"VP8L":
        data[21:25] = struct.pack("<I", (width - 1) | (height - 1) << 14)
    else:
        canvas = bytes(4) + (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
        data[12:12] = b"VP8X" + struct.pack("<I", 10) + canvas
    return bytes(data)


def wav_claiming(**fields: int) -> bytes:
    """A wav whose header has other figures than its samples: `rate`, `channels`, `bits`, `align`, `data`."""
    data = bytearray(_sound("WAV", "PCM_16"))
    places = {"channels": (22, "<H"), "rate": (24, "<I"), "align": (32, "<H"), "bits": (34, "<H"), "data": (40, "<I")}
    for name, value in fields.items():
        place, form = places[name]
        struct.pack_into(form, data, place, value)
    return bytes(data)


def mp4_claiming_samples(count: int) -> bytes:
    """An mp4 whose sample table counts `count` samples of one byte in its first chunk."""
    data = bytearray(samples.video_file("mp4"))
    sizes, chunks = data.index(b"stsz"), data.index(b"stsc")
    struct.pack_into(">II", data, sizes + 8, 1, count)
    struct.pack_into(">I", data, chunks + 8, 1)
    struct.pack_into(">I", data, chunks + 16, count)
    return bytes(data)


def mp4_fragment_claiming_samples(count: int) -> bytes:
    """A fragment whose run counts `count` samples that it says nothing about."""
    data = bytearray(fragmented_mp4())
    struct.pack_into(">II", data, data.index(b"trun") + 4, 0, count)
    return bytes(data)


def mp4_of_edits(count: int, seconds: float = 10) -> bytes:
    """An mp4 whose edit list shows the whole of it `count` times."""
    data = bytearray(samples.video_file("mp4", seconds=seconds, fps=24))
    start, table = data.index(b"edts") - 4, data.index(b"elst")
    size = int.from_bytes(data[start : start + 4])
    entries = bytes(data[table + 12 : table + 24]) * count
    inner = struct.pack(">I", 16 + len(entries)) + b"elst" + bytes(4) + struct.pack(">I", count) + entries
    data[start : start + size] = struct.pack(">I", 8 + len(inner)) + b"edts" + inner
    for box in (b"moov", b"trak"):
        place = data.index(box) - 4
        struct.pack_into(">I", data, place, int.from_bytes(data[place : place + 4]) + 8 + len(inner) - size)
    return bytes(data)


def mp4_with_box(name: bytes, body: bytes) -> bytes:
    """An mp4 with one more box after all others."""
    return samples.video_file("mp4") + struct.pack(">I", 8 + len(body)) + name + body


def vp9_claiming(width: int, height: int) -> bytes:
    """A webm whose container is honest and whose VP9 frames claim a size."""
    data = bytearray(samples.video_file("webm"))
    place = data.find(b"\x49\x83\x42")
    while place >= 0:
        bits = int.from_bytes(data[place + 3 : place + 8])
        size = ((width - 1) << 16 | (height - 1)) << 4
        data[place + 3 : place + 8] = (bits & ~(0xFFFFFFFF << 4) | size).to_bytes(5)
        place = data.find(b"\x49\x83\x42", place + 8)
    return bytes(data)


def _element(name: str, body: bytes) -> bytes:
    return bytes.fromhex(name) + (len(body) | 1 << 56).to_bytes(8) + body


def webm_of_laced_blocks(count: int, *, sound: bool) -> bytes:
    """A webm of `count` blocks of 256 frames, each of one byte: pictures, or sound beside no picture."""
    head = _element("1A45DFA3", _element("4282", b"webm") + _element("4287", b"\2") + _element("4285", b"\2"))
    info = _element("1549A966", _element("2AD7B1", struct.pack(">I", 1_000_000)))
    size = _element("B0", struct.pack(">H", 64)) + _element("BA", struct.pack(">H", 48))
    rate = _element("23E383", struct.pack(">I", 33_333_333))
    tracks = _element("AE", _track(1, 1, b"V_VP8") + rate + _element("E0", size))
    if sound:
        form = _element("B5", struct.pack(">f", 8000.0)) + _element("9F", b"\1") + _element("6264", b"\x10")
        tracks += _element("AE", _track(2, 2, b"A_PCM/INT/LIT") + _element("E1", form))
    block = _element("A3", (b"\x82" if sound else b"\x81") + b"\0\0\x84\xff" + bytes(256))
    cluster = _element("1F43B675", _element("E7", b"\0") + block * count)
    return head + _element("18538067", info + _element("1654AE6B", tracks) + cluster)


def _track(number: int, kind: int, codec: bytes) -> bytes:
    figures = (("D7", number), ("73C5", number), ("83", kind))
    return b"".join(_element(name, bytes([value])) for name, value in figures) + _element("86", codec)


def flac_of_tags(count: int) -> bytes:
    """A FLAC with so many comments."""
    whole = _sound("FLAC", "PCM_16")
    texts = b"".join(struct.pack("<I", 9) + b"%07d=x" % number for number in range(count))
    body = struct.pack("<II", 0, count) + texts
    return whole[:42] + b"\4" + len(body).to_bytes(3) + body + whole[42:]


def wav_of_tags(count: int) -> bytes:
    """A wav with so many entries of its INFO list."""
    whole = _sound("WAV", "PCM_16")
    body = b"INFO" + b"".join(b"%04x\2\0\0\0x\0" % number for number in range(count))
    return whole[:36] + b"LIST" + struct.pack("<I", len(body)) + body + whole[36:]


def _box(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", 8 + len(body)) + name + body


def mp4_of_tags(count: int) -> bytes:
    """An mp4 with so many tags of names of their own."""
    kind = _box(b"hdlr", bytes(8) + b"mdir" + bytes(13))
    tags = b"".join(
        _box(
            b"----",
            _box(b"mean", bytes(4) + b"org")
            + _box(b"name", bytes(4) + b"%07d" % number)
            + _box(b"data", struct.pack(">II", 1, 0) + b"x"),
        )
        for number in range(count)
    )
    added = _box(b"udta", _box(b"meta", bytes(4) + kind + _box(b"ilst", tags)))
    data = bytearray(samples.video_file("mp4"))
    place = data.index(b"moov") - 4
    size = int.from_bytes(data[place : place + 4])
    struct.pack_into(">I", data, place, size + len(added))
    data[place + size : place + size] = added
    return bytes(data)


def webm_of_tags(count: int) -> bytes:
    """A webm with so many tags."""
    tags = b"".join(
        _element("67C8", _element("45A3", b"%07d" % number) + _element("4487", b"x")) for number in range(count)
    )
    data = samples.video_file("webm")
    place = data.index(bytes.fromhex("1F43B675"))
    added = _element("1254C367", _element("7373", tags))
    # The segment states no length that the tags would exceed.
    segment = data.index(bytes.fromhex("18538067")) + 4
    return data[:segment] + b"\x01" + b"\xff" * 7 + data[segment + 8 : place] + added + data[place:]


def ogg_of_links(count: int) -> bytes:
    """So many Opus streams of one packet of silence each, joined."""
    head = b"OpusHead\1\1\0\0" + struct.pack("<I", 48000) + bytes(3)
    tags = b"OpusTags" + bytes(8)
    pages = [
        struct.pack("<5sBqIIIBB", b"OggS", flag, position, 1, number, 0, 1, len(body)) + body
        for number, (flag, position, body) in enumerate([(2, 0, head), (0, 0, tags), (4, 120, b"\xe0\xff\xfe")])
    ]
    return b"".join(page[:22] + struct.pack("<I", _ogg_sum(page)) + page[26:] for page in pages) * count


def _ogg_sum(page: bytes) -> int:
    total = 0
    for byte in page:
        total ^= byte << 24
        for _ in range(8):
            total = (total << 1 ^ (0x04C11DB7 if total >> 31 else 0)) & 0xFFFFFFFF
    return total


def amr_without_sound(count: int) -> bytes:
    """So many frames of no kind that has sound, of a byte each."""
    return b"#!AMR\n" + b"\x7c" * count


def still_video(side: int, frames: int) -> bytes:
    """H.264 of black frames: a few dozen bytes for each of side x side pixels."""
    out = io.BytesIO()
    with av.open(out, mode="w", format="mp4") as container:
        stream: Any = container.add_stream("libx264", rate=30, options={"preset": "ultrafast", "g": "1000"})
        stream.width, stream.height, stream.pix_fmt = side, side, "yuv420p"
        frame = av.VideoFrame(side, side, "yuv420p")
        for index, plane in enumerate(frame.planes):
            plane.update(bytes([16 if index == 0 else 128]) * plane.buffer_size)
        for index in range(frames):
            frame.pts, frame.time_base = index, Fraction(1, 30)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return out.getvalue()
