#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Asks through the gateway with nothing but curl and base64: about a picture, streamed, and for a text read aloud.
# Usage: examples/curl_openai.sh PICTURE.png WAV [http://HOST:PORT]
set -euo pipefail

picture=${1:?"usage: $0 PICTURE.png WAV [http://HOST:PORT]"}
wav=${2:?"usage: $0 PICTURE.png WAV [http://HOST:PORT]"}
gateway=${3:-http://localhost:8080}
json='Content-Type: application/json'
[[ -r $picture ]] || { echo "$picture: cannot be read" >&2 && exit 1; }

# Streamed: server-sent events, each with the text that is new. A picture may be longer than a command line.
{
    printf '{"model": "qwen2_5_omni", "stream": true, "messages": [{"role": "user", "content": ['
    printf '{"type": "image_url", "image_url": {"url": "data:image/png;base64,%s"}}, ' "$(base64 -w0 "$picture")"
    printf '{"type": "text", "text": "What is in the picture?"}]}]}'
} | curl -sS --fail-with-body -N "$gateway/v1/chat/completions" -H "$json" --data-binary @- || exit 1

# Read aloud: a WAV file, written while it comes; a refusal, which is JSON, takes its place. Its header states no length:
# `sox IN.wav OUT.wav` or `ffmpeg -i IN.wav OUT.wav` writes a file that does.
if ! curl -sS --fail-with-body "$gateway/v1/audio/speech" -H "$json" -o "$wav" \
    -d '{"model": "qwen2_5_omni", "voice": "Ethan", "input": "The sea is deep.", "seed": 7, "response_format": "wav"}'; then
    grep -s '"error"' "$wav" >&2 || true
    exit 1
fi
