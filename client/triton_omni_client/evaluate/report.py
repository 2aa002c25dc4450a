# SPDX-License-Identifier: Apache-2.0
"""The folder of an evaluation: `evaluate.json` with figures and replies, and the speech as WAV files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from triton_omni_client.audio import WavDecoder, Waveform
from triton_omni_client.errors import BadRequest, Internal
from triton_omni_client.report_file import write_report

from .asking import Answer
from .bounds import Checked
from .figures import KINDS, Interval, Share
from .judging import Judged, Judgement, Reference, References, Voices

SCHEMA: Final = "triton-omni-evaluate"
SCHEMA_VERSION: Final = 1
FILE: Final = "evaluate.json"


@dataclass(frozen=True)
class Earlier:
    """An earlier evaluation: the replies of its first setting, and its speakers."""

    references: References
    voices: Voices


@dataclass
class Report:
    """Judgements of all settings, with origin and notes."""

    environment: Mapping[str, Any]
    plan: Mapping[str, Any]
    judgements: list[Judgement] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    bounds: Sequence[Checked] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain JSON values."""
        first = self.judgements[0]
        return {
            "schema": SCHEMA,
            "schema_version": SCHEMA_VERSION,
            "environment": self.environment,
            "plan": self.plan,
            "notes": self.notes,
            "bounds": [asdict(each) for each in self.bounds],
            "voices": {voice: statistics.tolist() for voice, statistics in first.voices().items()},
            "settings": [_setting(each) for each in self.judgements],
        }

    def first_replies(self) -> dict[str, Answer]:
        """Return the first spoken reply of each setting that has one."""
        found: dict[str, Answer] = {}
        for judgement in self.judgements:
            spoken = [reply.answer for reply in judgement.replies if len(reply.answer.audio)]
            found |= {judgement.setting.name: spoken[0]} if spoken else {}
        return found

    def failures(self) -> list[str]:
        """Return a sentence about each setting with failed requests."""
        errors = {
            judgement.setting.name: [reply.answer.error for reply in judgement.replies if reply.answer.error]
            for judgement in self.judgements
        }
        return [f"{name}: {len(each)} requests failed; the first: {each[0]}" for name, each in errors.items() if each]

    def write(self, folder: Path) -> None:
        """Write the report and the replies' speech.

        Raises:
            BadRequest: a file cannot be written.
        """
        _make(folder)
        for judgement in self.judgements:
            for reply in judgement.replies:
                if len(reply.answer.audio):
                    _write_speech(folder / speech_file(judgement.setting.name, reply), reply.answer.wav())
        write_report(folder / FILE, self.to_json())


def _setting(judgement: Judgement) -> dict[str, Any]:
    return {
        "name": judgement.setting.name,
        "options": judgement.setting.options,
        "figures": figures_of(judgement),
        "replies": [_reply(judgement.setting.name, each) for each in judgement.replies],
    }


def figures_of(judgement: Judgement) -> dict[str, Any]:
    """Return the measured figures with unit and difference to the reference's, as plain JSON values."""
    found = {name: judgement.figure(name) for name in KINDS}
    return {
        name: asdict(each) | {"unit": KINDS[name].unit, "difference": _described(judgement.difference(name))}
        for name, each in found.items()
        if each is not None
    }


def speech_file(setting: str, reply: Judged) -> str:
    """Return the name of a reply's WAV file inside the folder."""
    return f"replies/{setting}/{reply.answer.question.name}.wav"


def _write_speech(path: Path, wav: bytes) -> None:
    _make(path.parent)
    try:
        path.write_bytes(wav)
    except OSError as error:
        raise BadRequest(f"{path}: cannot be written: {error.strerror}") from error


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadRequest(f"{folder}: cannot be made: {error.strerror}") from error


def _described(found: Interval | None) -> dict[str, Any] | None:
    return None if found is None else asdict(found) | {"apart": found.apart}


def _reply(setting: str, reply: Judged) -> dict[str, Any]:
    answer, question = reply.answer, reply.answer.question
    return {
        "name": question.name,
        "ask": question.ask,
        "voice": question.voice,
        "said": question.said,
        "expected": list(question.expected),
        "text": answer.text,
        "heard": None if reply.heard is None else " ".join(reply.heard),
        "error": answer.error,
        "file": speech_file(setting, reply) if len(answer.audio) else None,
        "boundaries": list(answer.boundaries),
        "shares": {name: list(share) for name, share in reply.shares.items()},
    }


def read_earlier(folder: Path) -> Earlier:
    """Read the folder of an evaluation.

    Raises:
        BadRequest: it holds none, or a file in it cannot be read.
    """
    path = folder / FILE
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if (found["schema"], found["schema_version"]) != (SCHEMA, SCHEMA_VERSION):
            raise BadRequest(f"{path}: is of another schema than {SCHEMA} {SCHEMA_VERSION}")
        references = {each["name"]: _reference(folder, each) for each in found["settings"][0]["replies"]}
        voices = {name: np.array(each, dtype=np.float64) for name, each in found["voices"].items()}
    except (OSError, ValueError, KeyError, TypeError, IndexError, Internal) as error:
        raise BadRequest(f"{path}: is no evaluation that can be read: {error!r:.200}") from error
    return Earlier(references, voices)


def _reference(folder: Path, reply: Mapping[str, Any]) -> Reference:
    shares = {name: Share(*share) for name, share in reply["shares"].items()}
    audio: Waveform | None = None
    if reply["file"] is not None:
        audio = WavDecoder().feed((folder / reply["file"]).read_bytes())
    return Reference(reply["ask"], reply["voice"], audio, shares)
