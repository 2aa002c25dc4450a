#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Asks with nothing but curl and Python's standard library: the text as it comes, then a whole reply with its WAV file.
# Usage: examples/curl_speech.sh WAV [http://HOST:PORT]
set -euo pipefail

wav=${1:?"usage: $0 WAV [http://HOST:PORT]"}
models=${2:-http://localhost:8000}/v2/models

# Streamed: server-sent events, each with the text that is new. `sampling_parameters` is JSON in a JSON string.
curl -sS --fail-with-body -N "$models/qwen2_5_omni/generate_stream" \
    -d '{"text_input": "What color is the sky?", "sampling_parameters": "{\"modalities\": [\"text\"]}"}' |
    python3 -c '
import json, sys
event = None
for line in filter(str.strip, sys.stdin):
    event = json.loads(line.removeprefix("data: "))
    if "error" in event:
        sys.exit(event["error"])
    print(event["text_output"], end="", flush=True)
if event:
    print()' || exit 1

# At once: the whole text, and a whole WAV file in base64.
reply=$(curl -sS --fail-with-body "$models/qwen2_5_omni_unary/generate" \
    -d '{"text_input": "What color is the sky?", "sampling_parameters": "{\"audio_format\": \"wav\", \"seed\": 7}"}') || {
    [[ -z $reply ]] || echo "$reply" >&2
    exit 1
}
python3 -c '
import base64, json, pathlib, sys
reply = json.load(sys.stdin)
print(reply["text_output"])
pathlib.Path(sys.argv[1]).write_bytes(base64.b64decode(reply["audio_base64"]))' "$wav" <<<"$reply"
