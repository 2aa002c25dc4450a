# SPDX-License-Identifier: Apache-2.0
"""`qwen2_5_omni_unary`: collects the ensemble's stream into one response, many requests at a time.

A BLS call cannot be cancelled through Triton, so every inner request carries a random token; when the outer request
is cancelled the token goes into the ledger, where the thinker finds it. A closed HTTP connection is invisible to
everybody on this Triton: the request's deadline bounds it.
"""

from __future__ import annotations

import base64
import json
import logging
import secrets
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch

from triton_omni import errors
from triton_omni.errors import InternalError, OmniError, Overloaded
from triton_omni.ledger import SessionLedger
from triton_omni.serving.outlet import SendingThread, TritonOutlet
from triton_omni.settings import UnarySettings
from triton_omni.token2wav.encoding import WAV_HEADER_BYTES, to_base64, wav_header
from triton_omni.wire import Answer

ENSEMBLE: Final = "qwen2_5_omni"
OUTPUTS: Final = ("text_output", "audio_output", "audio_base64", "info")
CANCEL_POLL_S: Final = 0.05

logger = logging.getLogger(__name__)


@dataclass
class Collected:
    """What the stream has given so far."""

    text: list[str] = field(default_factory=list)
    audio: list[np.ndarray[tuple[int], np.dtype[np.float32]]] = field(default_factory=list)
    encoded: list[bytes] = field(default_factory=list)
    info: str = ""

    def add(self, outputs: dict[str, Any]) -> None:
        """Add one response of the stream."""
        self.text.append(outputs["text_output"].decode())
        if len(outputs["audio_output"]):
            self.audio.append(outputs["audio_output"])
        if outputs["audio_base64"]:
            self.encoded.append(base64.b64decode(outputs["audio_base64"]))
        self.info = outputs["info"].decode() or self.info

    def to_answer(self) -> Answer:
        """The whole reply; streamed WAV chunks become one file whose header tells the true length."""
        encoded = b"".join(self.encoded)
        sample_rate = json.loads(self.info)["sample_rate"]
        if encoded.startswith(wav_header(sample_rate)):
            samples = encoded[WAV_HEADER_BYTES:]
            encoded = wav_header(sample_rate, len(samples)) + samples
        audio = torch.from_numpy(np.concatenate(self.audio)) if self.audio else None
        return Answer(text="".join(self.text), audio=audio, audio_base64=to_base64(encoded), info=self.info)


class UnaryModel:
    """Serves unary requests.

    Args:
        pb_utils: Triton's `triton_python_backend_utils`.
        settings: how many requests run at once; further ones are refused as overloaded.
    """

    def __init__(self, pb_utils: Any, ledger: SessionLedger, settings: UnarySettings) -> None:
        self._pb_utils = pb_utils
        self._ledger = ledger
        self._settings = settings
        self._pool = ThreadPoolExecutor(settings.max_requests, thread_name_prefix="omni-unary")
        self._thread = SendingThread("unary")
        self._running: dict[int, TritonOutlet] = {}
        self._cancelled: set[int] = set()
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="omni-unary-cancel", daemon=True)
        self._watcher.start()

    def execute(self, requests: Sequence[Any]) -> None:
        """Take requests; each is answered through its own sender."""
        for request in requests:
            outlet = TritonOutlet(self._pb_utils, request, self._thread)
            token = secrets.randbelow(2**63 - 1) + 1
            if not self._register(token, outlet):
                limit = self._settings.max_requests
                outlet.fail(Overloaded(f"all {limit} unary requests are in use", stage="unary", retry_after_ms=250))
                continue
            self._pool.submit(self._serve, request, token, outlet)

    def close(self) -> None:
        """Stop after the running requests; the stages end them when they close."""
        self._stopping.set()
        self._watcher.join()
        self._pool.shutdown()
        self._thread.close()
        self._ledger.close()

    def _register(self, token: int, outlet: TritonOutlet) -> bool:
        with self._lock:
            if len(self._running) >= self._settings.max_requests:
                return False
            self._running[token] = outlet
            return True

    def _serve(self, request: Any, token: int, outlet: TritonOutlet) -> None:
        try:
            outlet.send(self._collect(request, token).to_answer().to_tensors())
            outlet.finish()
        except OmniError as error:
            outlet.fail(error)
        except Exception:
            logger.exception("unary request %s failed", request.request_id())
            outlet.fail(InternalError("the reply could not be collected", stage="unary"))
        finally:
            with self._lock:
                del self._running[token]
                self._cancelled.discard(token)

    def _collect(self, request: Any, token: int) -> Collected:
        collected = Collected()
        for response in self._infer(request, token):
            if response.has_error():
                raise errors.parse(response.error().message())
            outputs = {tensor.name(): _value(tensor) for tensor in response.output_tensors()}
            if outputs:
                collected.add(outputs)
        if not collected.info:
            raise self._unfinished(token)
        if (error := json.loads(collected.info).get("error")) is not None:
            raise errors.parse(error)
        return collected

    def _unfinished(self, token: int) -> OmniError:
        with self._lock:
            if token in self._cancelled:
                return errors.Cancelled("the request was cancelled", stage="unary")
        return InternalError("the stream ended without its last response", stage="unary")

    def _infer(self, request: Any, token: int) -> Iterable[Any]:
        inputs = [tensor for tensor in request.inputs() if tensor.name() != "sampling_parameters"]
        inputs.append(self._with_token(request, token))
        inner = self._pb_utils.InferenceRequest(
            model_name=ENSEMBLE,
            requested_output_names=list(OUTPUTS),
            inputs=inputs,
            request_id=request.request_id(),
            parameters=json.loads(request.parameters() or "{}"),
        )
        responses: Iterable[Any] = inner.exec(decoupled=True)
        return responses

    def _with_token(self, request: Any, token: int) -> Any:
        """`sampling_parameters` with the cancel token; what is no JSON object goes on unchanged, to be refused."""
        given = self._pb_utils.get_input_tensor_by_name(request, "sampling_parameters")
        text = bytes(given.as_numpy().reshape(-1)[0]) if given is not None else b"{}"
        try:
            parameters = json.loads(text or b"{}")
        except (ValueError, RecursionError):
            parameters = None
        if isinstance(parameters, dict):
            text = json.dumps({**parameters, "cancel_token": str(token)}).encode()
        return self._pb_utils.Tensor("sampling_parameters", np.array([text], dtype=np.object_))

    def _watch(self) -> None:
        while not self._stopping.wait(CANCEL_POLL_S):
            with self._lock:
                running = dict(self._running)
            for token, outlet in running.items():
                if token not in self._cancelled and outlet.is_cancelled() and self._note_cancel(token):
                    self._ledger.cancel_token(token)

    def _note_cancel(self, token: int) -> bool:
        """Remember a cancel, unless the request has ended meanwhile."""
        with self._lock:
            if token in self._running:
                self._cancelled.add(token)
            return token in self._running


def _value(tensor: Any) -> Any:
    array = tensor.as_numpy()
    return bytes(array.reshape(-1)[0]) if array.dtype == np.object_ else array
