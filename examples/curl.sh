#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Asks about a picture with nothing but curl and base64: text only, streamed, over HTTP.
# Usage: examples/curl.sh PICTURE.png [http://HOST:PORT]
set -euo pipefail

picture=${1:?"usage: $0 PICTURE.png [http://HOST:PORT]"}
server=${2:-http://localhost:8000}
[[ -r $picture ]] || { echo "$picture: cannot be read" >&2 && exit 1; }

# `messages` and `sampling_parameters` are JSON in a JSON string, so their quotes are escaped.
# A picture may be longer than a command line: the body goes through a pipe.
{
    printf '{"sampling_parameters": "{\\"modalities\\": [\\"text\\"]}", "messages": "'
    printf '[{\\"role\\": \\"user\\", \\"content\\": ['
    printf '{\\"type\\": \\"image_url\\", \\"image_url\\": {\\"url\\": \\"data:image/png;base64,%s\\"}}, ' "$(base64 -w0 "$picture")"
    printf '{\\"type\\": \\"text\\", \\"text\\": \\"What is in the picture?\\"}]}]"}'
} | curl -sS --fail-with-body -N "$server/v2/models/qwen2_5_omni/generate_stream" --data-binary @- || exit 1
