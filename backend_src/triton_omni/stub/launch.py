# SPDX-License-Identifier: Apache-2.0
"""Builds each Triton model from its folder: settings, checkpoint, ledger, engine, stage, adapter.

Imported by every `model.py`, so heavy packages (torch, vLLM) are imported inside the functions that need them.
"""

from __future__ import annotations

import faulthandler
import locale
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from triton_omni.core.device import resolve_device, resolve_dtype_name
from triton_omni.core.endpoint import command_line, own_grpc_url
from triton_omni.core.errors import StageName
from triton_omni.core.heap import keep_freed_memory, never_collected, uncollected
from triton_omni.core.logs import configure_logging
from triton_omni.core.settings import (
    Device,
    SettingsError,
    SettingsT,
    TalkerSettings,
    ThinkerSettings,
    Token2WavSettings,
    UnarySettings,
    load_settings,
)
from triton_omni.core.tracing import NO_TRACER, Tracer
from triton_omni.session.ledger_table import EPOCH, STACKS_SIGNAL, wait_while_held
from triton_omni.session.server_folder import ledger_name, remove_stale

if TYPE_CHECKING:
    import torch

    from triton_omni.link.ring import Ring
    from triton_omni.session.ledger import SessionLedger, StageFacts
    from triton_omni.stub.adapter import StageAdapter
    from triton_omni.stub.unary import UnaryModel

_ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS: Final = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_SPOKEN: Final = "http/protobuf"
CHECKPOINT_VARIABLE = "OMNI_MODEL"
INVARIANCE_VARIABLE = "VLLM_BATCH_INVARIANT"
SOCKETS_VARIABLE = "VLLM_RPC_BASE_PATH"
HELD_AT_MOST_S = 300.0
"""Seconds after which a stage that waits for the supervisor loads anyway, since the supervisor is gone."""
ROW_PLACES = 64
CODE_PLACES = 256
"""Places of each session in a ring; the previous stage can run ahead by so many items."""
SWITCH_INTERVAL_S = 0.0001
"""Seconds that a thread may keep Python's global lock while another waits; Python's default is 5 ms.

The loop gives the lock up at every call of torch, hundreds of times a step. Beside threads with messages it then waits
so long each time.
"""
_TRITON_TYPES = {"float32": "TYPE_FP32", "bfloat16": "TYPE_BF16", "float16": "TYPE_FP16"}
# The talker's config rightly has ids of the thinker's vocabulary beside its vocabulary of codes; transformers warns of
# each such id.
_THINKER_IDS = re.compile(r"Model config: (tts_text|vision|audio)_(start|end|pad)_token_id must be ")
_DTYPE_CODES = {name: code for code, name in enumerate(_TRITON_TYPES, start=1)}

logger = logging.getLogger(__name__)


def complete_thinker(config: Any, folder: Path) -> Any:
    """Add ROWS with the dtype of the thinker's output."""
    config.add_output(_rows(_settings(folder, ThinkerSettings)))
    return config


def complete_talker(config: Any, folder: Path) -> Any:
    """Add ROWS with the dtype of the talker's input."""
    config.add_input(_rows(_settings(folder, TalkerSettings)))
    return config


def start_thinker(pb_utils: Any, args: dict[str, str], folder: Path) -> StageAdapter:
    """Load the thinker.

    Raises:
        SettingsError, CheckpointError, LedgerError: the message names the fault.
    """
    _prepare_process()
    keep_freed_memory()
    _await_turn("thinker")
    settings = _settings(folder, ThinkerSettings)
    _choose_invariance(settings)
    if settings.tensor_parallel_size > 1:
        _keep_sockets_in(folder)
    checkpoint = checkpoint_folder()
    with uncollected():
        from triton_omni.checkpoint.config import load_config
        from triton_omni.checkpoint.speakers import load_speakers
        from triton_omni.stub.adapter import adapt_thinker
        from triton_omni.thinker.preprocessing import Preprocessor
        from triton_omni.thinker.stage import ThinkerStage
        from triton_omni.vllm_hooks.thinker.engine import ThinkerVllmEngine

    config = load_config(checkpoint)
    device = _torch_device(settings.device, args)
    engine = ThinkerVllmEngine(checkpoint, settings, device)
    tracer = make_tracer("thinker")
    ledger = _ledger("thinker", _facts(checkpoint, device, settings, config.thinker.decoder.hidden_size))
    preprocessor = Preprocessor(checkpoint, config, load_speakers(checkpoint, config), settings, engine)
    stage = ThinkerStage(
        settings,
        engine,
        preprocessor,
        ledger,
        device=device,
        hidden_size=config.thinker.decoder.hidden_size,
        dtype=engine.dtype,
        tracer=tracer,
    )
    return adapt_thinker(pb_utils, stage, ledger, tracer)


def start_talker(pb_utils: Any, args: dict[str, str], folder: Path) -> StageAdapter:
    """Load the talker; raises as `start_thinker` does."""
    _prepare_process()
    _await_turn("talker")
    settings = _settings(folder, TalkerSettings)
    _choose_invariance(settings)
    checkpoint = checkpoint_folder()
    with uncollected():
        import torch

        from triton_omni.checkpoint.config import load_config
        from triton_omni.checkpoint.speakers import load_speakers
        from triton_omni.stub.adapter import adapt_talker
        from triton_omni.talker.stage import TalkerStage
        from triton_omni.vllm_hooks.talker.engine import TalkerVllmEngine

    config = load_config(checkpoint)
    speakers = load_speakers(checkpoint, config)
    device = _torch_device(settings.device, args)
    engine = TalkerVllmEngine(checkpoint, settings, device)
    tracer = make_tracer("talker")
    ledger = _ledger("talker", _facts(checkpoint, device, settings, config.talker.embedding_size))
    shape = (2 * settings.max_sessions, ROW_PLACES, config.talker.embedding_size)
    stage = TalkerStage(
        settings,
        engine,
        ledger,
        device=device,
        text_bos_id=lambda voice: speakers.get(voice).text_bos_id,
        tracer=tracer,
        ring=_ring(ledger, settings, shape, getattr(torch, _rows_dtype(settings)), device),
    )
    return adapt_talker(pb_utils, stage, ledger, tracer)


def start_token2wav(pb_utils: Any, args: dict[str, str], folder: Path) -> StageAdapter:
    """Load token2wav; raises as `start_thinker` does."""
    _prepare_process()
    _await_turn("token2wav")
    settings = _settings(folder, Token2WavSettings)
    checkpoint = checkpoint_folder()
    with uncollected():
        import torch

        from triton_omni.checkpoint.config import load_config
        from triton_omni.stub.adapter import adapt_token2wav
        from triton_omni.token2wav.engine import Token2WavEngine
        from triton_omni.token2wav.stage import Token2WavStage

    device = _torch_device(settings.device, args)
    _limit_threads(settings.threads)
    engine = Token2WavEngine(checkpoint, settings, device)
    tracer = make_tracer("token2wav")
    ledger = _ledger("token2wav", _facts(checkpoint, device))
    sample_rate = load_config(checkpoint).codec.sample_rate
    ring = _ring(ledger, settings, (2 * settings.max_streams, CODE_PLACES), torch.int32, device)
    stage = Token2WavStage(
        engine, ledger, device=device, sample_rate=sample_rate, policy=settings.policy, tracer=tracer, ring=ring
    )
    return adapt_token2wav(pb_utils, stage, ledger, tracer)


def start_unary(pb_utils: Any, args: dict[str, str], folder: Path) -> UnaryModel:
    """Start the unary model.

    Raises:
        SettingsError: its own or the thinker's `stage.yaml` cannot be used, or the server's gRPC endpoint is unknown.
    """
    del args
    _prepare_process()
    _await_turn("unary")
    settings = _settings(folder, UnarySettings)
    # Every stub is a child of tritonserver.
    grpc_url = settings.grpc_url or own_grpc_url(command_line(os.getppid()))
    from triton_omni.stub.unary import UnaryModel

    thinker = folder.parents[1] / "thinker" / folder.name
    timeout_s = (_settings(thinker, ThinkerSettings) if thinker.is_dir() else ThinkerSettings()).timeout_s
    return UnaryModel(pb_utils, settings, grpc_url, ledger_name(os.getppid()), timeout_s)


def end_process(close: Callable[[], None]) -> None:
    """Close this stub's model and end the process at once; all that `finalize` does.

    Triton has its answer by then and only waits for the process to end. Python itself would end the interpreter and the
    libraries' threads in no defined order; on an H200 three of four stops hung in that until the exit timeout.
    """
    try:
        with never_collected():
            close()
    except Exception:
        logger.exception("the model could not be closed in order")
    finally:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def checkpoint_folder() -> Path:
    """Return the folder of this server's checkpoint.

    Raises:
        SettingsError: `OMNI_MODEL` is unset or names no folder.
    """
    given = os.environ.get(CHECKPOINT_VARIABLE, "")
    if not given:
        raise SettingsError(f"{CHECKPOINT_VARIABLE} is not set: it names the folder of the checkpoint")
    if not Path(given).is_dir():
        raise SettingsError(f"{CHECKPOINT_VARIABLE}: {given} is not a folder")
    return Path(given)


def _prepare_process() -> None:
    # Triton's stub starts its interpreter in the C locale, in which torch's and vLLM's sources cannot be read.
    locale.setlocale(locale.LC_CTYPE, "C.UTF-8")
    configure_logging()
    _quiet_libraries()
    faulthandler.register(STACKS_SIGNAL, chain=True)
    sys.setswitchinterval(SWITCH_INTERVAL_S)


def _await_turn(stage: StageName) -> None:
    wait_while_held(ledger_name(os.getppid()), stage, HELD_AT_MOST_S)


def _quiet_libraries() -> None:
    """Silence warnings of libraries that come at every start and that nobody can act on."""
    logging.getLogger("transformers.configuration_utils").addFilter(_is_no_thinker_id)
    # vLLM reads every attribute of torch.distributed, which warns of some.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.reduce_op` is deprecated", FutureWarning)


def _is_no_thinker_id(record: logging.LogRecord) -> bool:
    return not _THINKER_IDS.match(record.getMessage())


def _settings(folder: Path, kind: type[SettingsT]) -> SettingsT:
    return load_settings(folder / "stage.yaml", kind)


def _rows(settings: ThinkerSettings | TalkerSettings) -> dict[str, Any]:
    return {"name": "ROWS", "data_type": _TRITON_TYPES[_rows_dtype(settings)], "dims": [-1, -1]}


def _rows_dtype(settings: ThinkerSettings | TalkerSettings) -> str:
    return resolve_dtype_name(settings.dtype, resolve_device(settings.device))


def _torch_device(device: Device, args: dict[str, str]) -> torch.device:
    import torch

    if resolve_device(device) == "cpu":
        return torch.device("cpu")
    chosen = torch.device("cuda", int(args["model_instance_device_id"]))
    torch.cuda.set_device(chosen)
    return chosen


def _choose_invariance(settings: ThinkerSettings | TalkerSettings) -> None:
    """Ask vLLM for batch invariance, before its import, which reads the variable. Only GPUs have the kernels."""
    if settings.engine.deterministic and resolve_device(settings.device) == "cuda":
        os.environ[INVARIANCE_VARIABLE] = "1"


def _keep_sockets_in(folder: Path) -> None:
    """Put the sockets of a split thinker's processes, which vLLM never removes, into the served copy of its model's
    folder, which the supervisor removes.
    """
    if os.access(folder, os.W_OK):
        os.environ.setdefault(SOCKETS_VARIABLE, str(folder))


def _ring(
    ledger: SessionLedger,
    settings: TalkerSettings | Token2WavSettings,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> Ring | None:
    """Return the ring that a stage offers to the stage before; None = settings ask for none.

    Raises:
        SettingsError: settings ask for a ring, and its memory cannot be shared.
    """
    from triton_omni.link.ring import RingError, offer_ring

    if settings.ring is False or (settings.ring == "auto" and device.type != "cuda"):
        return None
    try:
        return offer_ring(
            ledger.name, ledger.stage, ledger.word(EPOCH, ledger.stage), shape=shape, dtype=dtype, device=device
        )
    except (RingError, OSError) as error:
        if settings.ring is True:
            raise SettingsError(f"ring true, and its memory cannot be shared: {error}") from error
        logger.warning("no ring, messages of Triton's take its place, which are slower: %s", error)
        return None


def _limit_threads(threads: int) -> None:
    import torch

    if threads:
        torch.set_num_threads(threads)


def _facts(
    checkpoint: Path,
    device: torch.device,
    settings: ThinkerSettings | TalkerSettings | None = None,
    hidden_size: int = 0,
) -> StageFacts:
    from triton_omni.checkpoint.config import fingerprint
    from triton_omni.session.ledger import StageFacts

    code = _DTYPE_CODES[_rows_dtype(settings)] if settings is not None else 0
    on = 0 if device.index is None else 1 + device.index
    return StageFacts(fingerprint(checkpoint), code, hidden_size, on)


def _ledger(stage: StageName, facts: StageFacts) -> SessionLedger:
    from triton_omni.session.ledger import SessionLedger

    remove_stale()
    # Every stub is a child of tritonserver, whose process names the table.
    return SessionLedger(ledger_name(os.getppid()), stage, facts)


def make_tracer(stage: StageName, environment: Mapping[str, str] = os.environ) -> Tracer:
    """Return the tracer of a stage, one that does nothing without an endpoint or with traces switched off.

    OpenTelemetry is imported only for an endpoint.

    Raises:
        SettingsError: another protocol is asked for, or OpenTelemetry is not installed.
    """
    is_off = environment.get("OTEL_SDK_DISABLED", "").lower() == "true"
    if is_off or environment.get("OTEL_TRACES_EXPORTER") == "none" or not any(map(environment.get, _ENDPOINTS)):
        return NO_TRACER
    for variable in _PROTOCOLS:
        if (asked := environment.get(variable) or _SPOKEN) != _SPOKEN:
            raise SettingsError(f"{variable}: spans leave by {_SPOKEN}, not {asked!r:.80}")
    try:
        from triton_omni.stub.otel import OtelTracer, exporting_provider
    except ImportError as error:
        raise SettingsError(f"traces are asked for, but OpenTelemetry is not installed: {error}") from error
    return OtelTracer(stage, exporting_provider(environment))
