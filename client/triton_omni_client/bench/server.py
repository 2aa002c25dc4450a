# SPDX-License-Identifier: Apache-2.0
"""Facts of the measured server: version and models, from the metadata calls of Triton's protocol.

A server that does not answer one of them leaves a note, and the benchmark goes on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import grpc  # type: ignore[import-untyped]
from tritonclient.grpc import service_pb2, service_pb2_grpc  # type: ignore[import-untyped]

from triton_omni_client.catalog import checkpoint_of, config_of
from triton_omni_client.protocol import MAX_MESSAGE_BYTES, channel_options

CALL_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class ServerFacts:
    """Name and version of the server, and the models of the ensemble with their versions."""

    name: str | None = None
    version: str | None = None
    models: tuple[str, ...] = ()
    """The model asked, then the models that its ensemble is made of, as `name:version`."""
    checkpoint: str | None = None
    """Checkpoint that it serves; None where it does not tell."""
    notes: tuple[str, ...] = ()

    def described(self) -> dict[str, Any]:
        """Return the facts as a report has them."""
        return {
            "name": self.name,
            "version": self.version,
            "models": list(self.models),
            "checkpoint": self.checkpoint,
        }


async def server_facts(url: str, model: str) -> ServerFacts:
    """Ask a server over gRPC what it is."""
    notes: list[str] = []
    async with grpc.aio.insecure_channel(url, options=channel_options(MAX_MESSAGE_BYTES)) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        server = await _ask(stub.ServerMetadata, service_pb2.ServerMetadataRequest(), notes)
        config = await _ask(stub.ModelConfig, service_pb2.ModelConfigRequest(name=model), notes)
        checkpoint = None if config is None else checkpoint_of(config_of(config))
        steps = [] if config is None else [step.model_name for step in config.config.ensemble_scheduling.step]
        models = [await _model(stub, name, notes) for name in [model, *steps]]
    found = tuple(name for name in models if name is not None)
    if server is None:
        return ServerFacts(models=found, checkpoint=checkpoint, notes=tuple(notes))
    return ServerFacts(server.name, server.version, found, checkpoint, tuple(notes))


async def _model(stub: Any, name: str, notes: list[str]) -> str | None:
    metadata = await _ask(stub.ModelMetadata, service_pb2.ModelMetadataRequest(name=name), notes)
    return None if metadata is None else f"{metadata.name}:{','.join(metadata.versions)}"


async def _ask(call: Any, request: Any, notes: list[str]) -> Any | None:
    try:
        return await call(request, timeout=CALL_TIMEOUT_S)
    except grpc.RpcError as error:
        notes.append(f"the server did not answer {type(request).__name__}: {error.code().name}")
        return None
