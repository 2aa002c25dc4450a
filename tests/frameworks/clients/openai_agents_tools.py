# SPDX-License-Identifier: Apache-2.0
"""OpenAI's Agents SDK: an agent that uses a tool, then answers."""

import json
from typing import Literal

from agents import Agent, ModelSettings, Runner, function_tool, set_default_openai_api, set_tracing_disabled

set_default_openai_api("chat_completions")
set_tracing_disabled(True)
asked = []


@function_tool
def get_weather(city: Literal["Paris", "Rome"]) -> str:
    """The weather in a city."""
    asked.append(city)
    return "The sky is blue."


agent = Agent(
    name="Assistant",
    instructions="You are a helpful assistant.",
    tools=[get_weather],
    model_settings=ModelSettings(tool_choice="required"),
)
result = Runner.run_sync(agent, "What is the weather in Paris?")
print(json.dumps({"cities": asked, "answer": result.final_output}))
