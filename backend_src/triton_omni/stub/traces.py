# SPDX-License-Identifier: Apache-2.0
"""Exports a stage's spans if OpenTelemetry's environment variables ask for it.

Without an endpoint nothing of OpenTelemetry is imported.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

from triton_omni.core.errors import StageName
from triton_omni.core.settings import SettingsError
from triton_omni.core.tracing import NO_TRACER, Tracer

_ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS: Final = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_SPOKEN: Final = "http/protobuf"


def make_tracer(stage: StageName, environment: Mapping[str, str] = os.environ) -> Tracer:
    """The tracer of a stage; one that does nothing where no endpoint is configured, or traces are switched off.

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
