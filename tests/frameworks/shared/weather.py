# SPDX-License-Identifier: Apache-2.0
"""A function that a model may call, as OpenAI's APIs describe it."""

FUNCTION = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
