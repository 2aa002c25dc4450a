# SPDX-License-Identifier: Apache-2.0
"""Between Triton's Python backend and a stage: requests in, response senders out, errors to Triton's codes.

`pb_utils` is passed in, so that all of this can be tested without a server.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from triton_omni.core.errors import BadRequest, InternalError, OmniError, StageName
from triton_omni.core.tracing import NO_TRACER, Tracer
from triton_omni.link.receiver import LinkLatency, Until
from triton_omni.request.parse import RawRequest
from triton_omni.session.ledger import SessionLedger
from triton_omni.session.ledger_table import EPOCH
from triton_omni.session.stage import ResponseSender, Stage
from triton_omni.session.wire import Unsealed
from triton_omni.stub.metrics import StageMetrics
from triton_omni.stub.request_parameters import CLIENT_INPUTS, read_id, read_parameters, sampling_of
from triton_omni.stub.response_sender import SendingThread, TritonResponseSender
from triton_omni.stub.tensors import LinkCounter, LinkInputs, bound_strings, read_bytes
from triton_omni.talker.stage import TalkerStage
from triton_omni.thinker import direct_calls
from triton_omni.thinker.stage import ThinkerStage
from triton_omni.token2wav.stage import Token2WavStage

SENDING_THREADS = 4
"""Number of threads that share the sessions: a send takes a few tenths of a millisecond, most of it in Triton."""

Submit = Callable[[Any, ResponseSender], None]

logger = logging.getLogger(__name__)


class StageAdapter:
    """One Triton model around one stage.

    Args:
        pb_utils: Triton's `triton_python_backend_utils`.
        submit: reads a Triton request and gives it to the stage.
        ledger: the stage's, closed after its last answer.
        link_latency: latency of the messages from the stage before, if there is one.
        tracer: of the stage's spans; closed last.
    """

    def __init__(
        self,
        pb_utils: Any,
        name: StageName,
        stage: Stage,
        submit: Submit,
        *,
        counter: LinkCounter,
        ledger: SessionLedger,
        link_latency: Mapping[Until, LinkLatency] | None = None,
        tracer: Tracer = NO_TRACER,
    ) -> None:
        bound_strings(pb_utils)
        self._pb_utils = pb_utils
        self._name = name
        self._stage = stage
        self._ledger = ledger
        self._tracer = tracer
        self._submit = submit
        self._threads = tuple(SendingThread(f"{name}-{number}") for number in range(SENDING_THREADS))
        self._metrics = StageMetrics(pb_utils, name, stage, counter, link_latency, starts=ledger.word(EPOCH, name))
        stage.start()

    def execute(self, requests: Sequence[Any]) -> None:
        """Take requests; each is answered later through its own sender, so a bad one harms no other."""
        self._metrics.start()
        for request in requests:
            self._accept(request)

    def close(self) -> None:
        """End every session, send what is due, and stop."""
        # The last callback runs first, and each runs even if an earlier one fails: due responses must leave, and the
        # ledger is written to until they have left.
        with contextlib.ExitStack() as ending:
            ending.callback(self._tracer.close)
            ending.callback(self._ledger.close)
            ending.callback(self._metrics.close)
            for thread in self._threads:
                ending.callback(thread.close)
            ending.callback(self._stage.close)

    def _accept(self, request: Any) -> None:
        sender = TritonResponseSender(self._pb_utils, request, self._threads)
        try:
            self._submit(request, sender)
        except OmniError as error:
            error.stage = error.stage or self._name
            sender.fail(error)
        except Exception:
            logger.exception("a request could not be taken")
            sender.fail(InternalError("the request could not be read", stage=self._name))


def adapt_thinker(
    pb_utils: Any, stage: ThinkerStage, ledger: SessionLedger, tracer: Tracer = NO_TRACER
) -> StageAdapter:
    """Return the adapter of the thinker, which takes clients' requests."""

    def submit(request: Any, sender: ResponseSender) -> None:
        try:
            direct_calls.check_outputs(request.requested_output_names())
            raw = read_client_request(request, traced=tracer.is_on)
        except Exception as error:
            stage.request_metrics.count_unread(error)
            raise
        stage.submit(raw, sender)

    return StageAdapter(pb_utils, "thinker", stage, submit, counter=LinkCounter(), ledger=ledger, tracer=tracer)


def adapt_talker(pb_utils: Any, stage: TalkerStage, ledger: SessionLedger, tracer: Tracer = NO_TRACER) -> StageAdapter:
    """Return the adapter of the talker, which takes the thinker's messages."""
    return _adapt_link(pb_utils, "talker", stage, ledger, tracer)


def adapt_token2wav(
    pb_utils: Any, stage: Token2WavStage, ledger: SessionLedger, tracer: Tracer = NO_TRACER
) -> StageAdapter:
    """Return the adapter of token2wav, which takes the talker's messages."""
    return _adapt_link(pb_utils, "token2wav", stage, ledger, tracer)


def _adapt_link(
    pb_utils: Any, name: StageName, stage: TalkerStage | Token2WavStage, ledger: SessionLedger, tracer: Tracer
) -> StageAdapter:
    counter = LinkCounter()

    def submit(request: Any, sender: ResponseSender) -> None:
        # An error response here would leak the ensemble's request while the thinker's sender is open. So the message is
        # closed empty; the stage ends its session, if the message names one.
        try:
            stage.submit(LinkInputs(request, counter), sender)
        except Unsealed as error:
            logger.warning("%s: a message was closed unread: %s", name, error.message)
            sender.finish()
        except Exception:
            logger.exception("%s: a message could not be read", name)
            sender.finish()

    return StageAdapter(
        pb_utils, name, stage, submit, counter=counter, ledger=ledger, link_latency=stage.link_latency, tracer=tracer
    )


def read_client_request(request: Any, *, traced: bool = False) -> RawRequest:
    """Read the four public inputs of a Triton request, unchecked, Triton's own timeout, and, if it is traced,
    `traceparent`.

    Raises:
        BadRequest: an input has a wrong number of elements, a parameter was meant as an input, or the id is not UTF-8.
        TooLarge: there are too many elements or parameters, or the id is too long.
    """
    request_id = read_id(request)
    # W3C's header, which gRPC and HTTP clients give as a parameter of the request.
    parameters = read_parameters(request)
    traceparent = parameters.get("traceparent")
    given = read_bytes(request, CLIENT_INPUTS)
    return RawRequest(
        text_input=_one(given["text_input"], "text_input"),
        messages=_one(given["messages"], "messages"),
        media=tuple(given["media"] or ()),
        sampling_parameters=sampling_of(parameters, _one(given["sampling_parameters"], "sampling_parameters")),
        request_id=request_id,
        timeout_us=request.timeout(),
        traceparent=traceparent if traced and isinstance(traceparent, str) else "",
    )


def _one(values: list[bytes] | None, name: str) -> bytes | None:
    if values is None:
        return None
    if len(values) != 1:
        raise BadRequest(f"{name}: expected one element, found {len(values)}")
    return values[0]
