# SPDX-License-Identifier: Apache-2.0
"""A model's start from its folder: its messages to Triton, refusals to load, agreement between the stages."""

import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fake_pb_utils import PbUtils, Request, TritonError, text_tensor
from triton_omni.checkpoint.config import CheckpointError, fingerprint
from triton_omni.core.settings import SettingsError, TalkerSettings, ThinkerSettings
from triton_omni.link.ring import RingError
from triton_omni.session import server_folder
from triton_omni.session.ledger import SessionLedger, StageFacts
from triton_omni.session.server_folder import LedgerError, ledger_name
from triton_omni.stub import launch
from triton_omni.stub.launch import (
    checkpoint_folder,
    complete_talker,
    complete_thinker,
    start_token2wav,
    start_unary,
)
from triton_omni.stub.tensors import write_tensor
from waiting import IN_TIME_S

CPU = torch.device("cpu")

REPOSITORY = Path(__file__).parents[2] / "model_repository"
ARGS = {"model_instance_device_id": "0"}


class Config:
    """The configuration that Triton gives to complete."""

    def __init__(self):
        self.inputs, self.outputs = [], []

    def add_input(self, tensor):
        self.inputs.append(tensor)

    def add_output(self, tensor):
        self.outputs.append(tensor)


@pytest.fixture
def folder(tmp_path):
    def write(text=""):
        (tmp_path / "stage.yaml").write_text(text)
        return tmp_path

    return write


@pytest.fixture
def machine(monkeypatch):
    """A machine with as many GPUs as the test says; torch is not asked."""

    def has(gpus):
        monkeypatch.setattr("triton_omni.core.device.gpu_count", lambda: gpus)

    return has


@pytest.fixture
def shared_memory(monkeypatch):
    """Tables in a folder of the test, in place of /dev/shm, whose name is short, since a socket's may have 107 bytes.
    The server is this process's parent."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setattr(server_folder, "_SHARED_MEMORY", Path(folder))
        yield Path(folder)


@pytest.fixture
def omni_model(tiny_checkpoint, monkeypatch):
    monkeypatch.setenv("OMNI_MODEL", str(tiny_checkpoint))
    return tiny_checkpoint


# Completing the configuration.


@pytest.mark.parametrize(
    ("text", "gpus", "data_type"),
    [
        ("", 0, "TYPE_FP32"),
        ("", 1, "TYPE_BF16"),
        ("device: cpu", 1, "TYPE_FP32"),
        ("dtype: float16", 1, "TYPE_FP16"),
        ("dtype: float32", 1, "TYPE_FP32"),
        ("dtype: bfloat16", 0, "TYPE_BF16"),
    ],
)
def test_rows_have_the_dtype_of_device_and_settings_on_both_ends(folder, machine, text, gpus, data_type):
    machine(gpus)
    rows = {"name": "ROWS", "data_type": data_type, "dims": [-1, -1]}
    thinker, talker = complete_thinker(Config(), folder(text)), complete_talker(Config(), folder(text))
    assert (thinker.outputs, thinker.inputs) == ([rows], [])
    assert (talker.inputs, talker.outputs) == ([rows], [])


@pytest.mark.parametrize("complete", [complete_thinker, complete_talker])
def test_settings_that_cannot_be_used_stop_the_load_here_already(folder, machine, complete):
    machine(0)
    with pytest.raises(SettingsError, match=r"stage\.yaml: device"):
        complete(Config(), folder("device: tpu"))
    with pytest.raises(SettingsError, match="shows no GPU"):
        complete(Config(), folder("device: cuda"))


@pytest.mark.parametrize("complete", [complete_thinker, complete_talker])
def test_a_folder_without_settings_is_refused(tmp_path, complete):
    with pytest.raises(SettingsError, match=r"stage\.yaml: cannot be read"):
        complete(Config(), tmp_path)


# Variables that vLLM reads when it is imported.


@pytest.fixture
def no_checkpoint(monkeypatch):
    """A stage stops when it has read its settings."""
    monkeypatch.setattr(launch, "_prepare_process", lambda: None)
    monkeypatch.delenv("OMNI_MODEL", raising=False)
    # Set first, so that it is put back afterwards.
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "0")
    monkeypatch.delenv("VLLM_BATCH_INVARIANT")


@pytest.mark.usefixtures("no_checkpoint")
@pytest.mark.parametrize(
    ("text", "gpus", "chosen"),
    [
        ("", 1, None),
        ("{prefix_caching: false, engine: {deterministic: true}}", 1, "1"),
        ("{prefix_caching: false, engine: {deterministic: true}}", 0, None),
        ("{device: cpu, prefix_caching: false, engine: {deterministic: true}}", 1, None),
    ],
)
def test_batch_invariance_is_a_gpu_s_and_only_where_it_is_asked_for(folder, machine, text, gpus, chosen):
    machine(gpus)
    for start in (launch.start_thinker, launch.start_talker):
        os.environ.pop("VLLM_BATCH_INVARIANT", None)
        with pytest.raises(SettingsError, match="OMNI_MODEL is not set"):
            start(None, {}, folder(text))
        assert os.environ.get("VLLM_BATCH_INVARIANT") == chosen


# The checkpoint.


def test_the_checkpoint_is_the_folder_that_the_environment_names(omni_model):
    assert checkpoint_folder() == omni_model


@pytest.mark.parametrize("value", [None, ""])
def test_an_unset_checkpoint_is_told_with_its_variable(monkeypatch, value):
    monkeypatch.delenv("OMNI_MODEL", raising=False)
    if value is not None:
        monkeypatch.setenv("OMNI_MODEL", value)
    with pytest.raises(SettingsError, match="OMNI_MODEL is not set"):
        checkpoint_folder()


def test_a_checkpoint_that_is_no_folder_is_told_with_its_path(monkeypatch, tmp_path):
    monkeypatch.setenv("OMNI_MODEL", str(tmp_path / "nowhere"))
    with pytest.raises(SettingsError, match=r"OMNI_MODEL: .*nowhere is not a folder"):
        checkpoint_folder()


def test_a_folder_without_a_checkpoint_is_refused(monkeypatch, tmp_path, folder, shared_memory):
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.setenv("OMNI_MODEL", str(empty))
    with pytest.raises(CheckpointError, match="empty"):
        start_token2wav(PbUtils(), ARGS, folder("device: cpu"))
    assert list(shared_memory.iterdir()) == []


# Agreement between the stages.


def test_facts_are_the_checkpoints_fingerprint_and_the_links_dtype_and_size(omni_model, machine):
    machine(0)
    dtypes = ["float32", "bfloat16", "float16"]
    facts = [launch._facts(omni_model, CPU, ThinkerSettings(dtype=dtype), 64) for dtype in dtypes]
    assert {fact.fingerprint for fact in facts} == {fingerprint(omni_model)}
    assert {fact.hidden_size for fact in facts} == {64}
    assert len({fact.dtype for fact in facts}) == 3
    assert 0 not in {fact.dtype for fact in facts}
    assert launch._facts(omni_model, CPU, TalkerSettings(), 64) == facts[0]
    assert launch._facts(omni_model, CPU) == StageFacts(fingerprint(omni_model))
    assert launch._facts(omni_model, torch.device("cuda", 1)).device == 2


def test_a_stage_of_another_checkpoint_is_refused(omni_model, folder, shared_memory):
    del omni_model
    other = SessionLedger(ledger_name(launch.os.getppid()), "thinker", StageFacts(1))
    with pytest.raises(LedgerError, match="checkpoint fingerprint of token2wav"):
        start_token2wav(PbUtils(), ARGS, folder("device: cpu"))
    other.close()
    assert list(shared_memory.iterdir()) == []


# Whole models.


def test_token2wav_starts_answers_and_closes(omni_model, folder, shared_memory):
    del omni_model
    adapter = start_token2wav(PbUtils(), ARGS, folder("device: cpu"))
    [table] = shared_memory.iterdir()
    assert table.name == ledger_name(launch.os.getppid())
    request = Request([write_tensor(PbUtils(), "META", b"{}")])
    adapter.execute([request])
    assert request.sender.done.wait(IN_TIME_S)
    assert request.sender.responses == []
    adapter.close()
    assert list(shared_memory.iterdir()) == []


@pytest.mark.parametrize(
    ("ring", "files"), [("auto", []), ("true", ["token2wav-bell", "token2wav-ring"]), ("false", [])]
)
def test_a_ring_is_offered_where_it_is_asked_for_and_goes_with_its_stage(
    omni_model, folder, shared_memory, ring, files
):
    del omni_model
    adapter = start_token2wav(PbUtils(), ARGS, folder(f"device: cpu\nring: {ring}"))
    [made] = shared_memory.iterdir()
    assert sorted(path.name for path in made.iterdir()) == ["ledger", *files]
    adapter.close()
    assert list(shared_memory.iterdir()) == []


@pytest.mark.parametrize("ring", ["auto", "true"])
def test_a_ring_that_cannot_be_had_stops_the_load_only_where_it_is_asked_for(folder, monkeypatch, ring, caplog):
    settings = launch.load_settings(folder(f"ring: {ring}") / "stage.yaml", launch.Token2WavSettings)
    ledger = SimpleNamespace(name="a table", stage="token2wav", word=lambda field, model: 1)

    def refuse(*names, **shape):
        raise RingError("CUDA says no")

    monkeypatch.setattr("triton_omni.link.ring.offer_ring", refuse)
    gpu = torch.device("cuda", 0)
    if ring == "true":
        with pytest.raises(SettingsError, match="ring true, and its memory cannot be shared: CUDA says no"):
            launch._ring(ledger, settings, (2, 4), torch.int32, gpu)
    else:
        assert launch._ring(ledger, settings, (2, 4), torch.int32, gpu) is None
        assert "messages of Triton's take its place, which are slower: CUDA says no" in caplog.text


def test_threads_of_the_settings_are_used(omni_model, folder, shared_memory, monkeypatch):
    del omni_model, shared_memory
    seen = []
    monkeypatch.setattr(torch, "set_num_threads", seen.append)
    start_token2wav(PbUtils(), ARGS, folder("device: cpu\nthreads: 3")).close()
    start_token2wav(PbUtils(), ARGS, folder("device: cpu")).close()
    assert seen == [3]


def test_the_unary_model_asks_where_its_settings_say(folder):
    model = start_unary(PbUtils(), ARGS, folder("max_requests: 1\ngrpc_url: 127.0.0.1:9"))
    request = Request([text_tensor("text_input", "hi")])
    model.execute([request])
    assert request.sender.done.wait(IN_TIME_S)
    assert request.sender.error.code() == TritonError.INTERNAL
    assert "the stream from 127.0.0.1:9 broke: UNAVAILABLE" in request.sender.error.message()
    model.close()


def test_the_unary_model_finds_its_server_by_the_command_line(folder, monkeypatch):
    monkeypatch.setattr(launch, "command_line", lambda pid: ["--grpc-port=12345"] if pid == os.getppid() else [])
    model = start_unary(PbUtils(), ARGS, folder("max_requests: 1"))
    assert model._grpc_url == "127.0.0.1:12345"
    model.close()


@pytest.mark.parametrize(("thinker", "seconds"), [(None, 120.0), ("device: cpu", 120.0), ("timeout_s: 7", 7.0)])
def test_the_unary_model_knows_the_thinker_s_deadline(tmp_path, thinker, seconds):
    own = tmp_path / "qwen2_5_omni_unary" / "1"
    for path, text in ((own, "grpc_url: 127.0.0.1:9"), (tmp_path / "thinker" / "1", thinker)):
        if text is not None:
            path.mkdir(parents=True)
            (path / "stage.yaml").write_text(text)
    model = start_unary(PbUtils(), ARGS, own)
    assert model._timeout_s == seconds
    model.close()


def test_the_unary_model_is_not_loaded_where_grpc_is_off(folder, monkeypatch):
    monkeypatch.setattr(launch, "command_line", lambda pid: ["--allow-grpc=false"])
    with pytest.raises(SettingsError, match="--allow-grpc"):
        start_unary(PbUtils(), ARGS, folder("max_requests: 1"))


@pytest.mark.parametrize("model", ["thinker", "talker", "token2wav", "qwen2_5_omni_unary"])
def test_every_model_file_has_the_calls_that_triton_makes(monkeypatch, machine, model):
    machine(0)
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", PbUtils())
    path = REPOSITORY / model / "1" / "model.py"
    spec = importlib.util.spec_from_file_location(f"model_of_{model}", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    spec.loader.exec_module(module)
    assert path.parent == module.FOLDER
    calls = module.TritonPythonModel
    assert all(callable(getattr(calls, name)) for name in ("initialize", "execute", "finalize"))
    if model in ("thinker", "talker"):
        config = calls.auto_complete_config(Config())
        assert [tensor["name"] for tensor in config.inputs + config.outputs] == ["ROWS"]


def test_a_closed_stage_s_process_ends_at_once_with_its_log_written():
    code = """
import atexit, logging, threading
from triton_omni.stub.launch import end_process

atexit.register(threading.Event().wait)  # what hangs at the end of an interpreter
threading.Thread(target=threading.Event().wait).start()
logging.basicConfig(format="%(message)s")
print("printed", end="")
end_process(lambda: logging.warning("the last line"))
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert (ended.stdout, ended.stderr) == ("printed", "the last line\n")


def test_a_stage_that_cannot_be_closed_ends_all_the_same_and_says_why():
    code = "import triton_omni.stub.launch as launch; launch.end_process(lambda: 1 / 0)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "the model could not be closed in order" in ended.stderr
    assert "ZeroDivisionError" in ended.stderr


def test_threads_that_wait_for_the_interpreter_get_it_soon():
    code = "import sys; from triton_omni.stub.launch import _prepare_process; _prepare_process()"
    said = subprocess.run(
        [sys.executable, "-c", f"{code}; print(sys.getswitchinterval())"], capture_output=True, check=True
    )
    assert float(said.stdout) == pytest.approx(launch.SWITCH_INTERVAL_S)
    assert launch.SWITCH_INTERVAL_S < 0.005


def test_only_warnings_that_nobody_can_act_on_are_kept_out_of_the_log():
    code = """import logging, sys, warnings
from triton_omni.link.ring import RingError
from triton_omni.stub import launch
launch._prepare_process()
logger = logging.getLogger("transformers.configuration_utils")
for name in ("tts_text_start_token_id", "audio_end_token_id", "pad_token_id"):
    logger.warning(f"Model config: {name} must be `None` or an integer within the vocabulary")
warnings.warn("`torch.distributed.reduce_op` is deprecated, please use another", FutureWarning)
warnings.warn("something else is deprecated", FutureWarning)
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stderr
    assert "Model config: pad_token_id must be" in said
    assert "something else is deprecated" in said
    assert "tts_text" not in said
    assert "audio_end" not in said
    assert "reduce_op" not in said
