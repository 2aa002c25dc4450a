#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Asks with nothing but curl and Python's standard library: the text as it comes, then a whole reply with its WAV file.
# Usage: examples/curl_speech.sh WAV [http://HOST:PORT]
set -euo pipefail

wav=${1:?"usage: $0 WAV [http://HOST:PORT]"}
models=${2:-http://localhost:8000}/v2/models

# Streamed: server-sent events, each with the text that is new. `sampling_parameters` is JSON in a JSON string.
curl -sfN "$models/qwen2_5_omni/generate_stream" \
    -d '{"text_input": "What is the sea?", "sampling_parameters": "{\"modalities\": [\"text\"]}"}' |
    python3 -c '
import json, sys
for line in sys.stdin:
    if line.startswith("data: "):
        print(json.loads(line.removeprefix("data: "))["text_output"], end="", flush=True)
print()'

# At once: the whole text, and a whole WAV file in base64.
curl -sf "$models/qwen2_5_omni_unary/generate" \
    -d '{"text_input": "What is the sea?", "sampling_parameters": "{\"audio_format\": \"wav\", \"seed\": 7}"}' |
    python3 -c '
import base64, json, pathlib, sys
reply = json.load(sys.stdin)
print(reply["text_output"])
pathlib.Path(sys.argv[1]).write_bytes(base64.b64decode(reply["audio_base64"]))' "$wav"
