# SPDX-License-Identifier: Apache-2.0
"""LangChain: a model with a bound tool calls it, and answers after its result."""

import json
from typing import Literal

from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

MODEL = "qwen2_5_omni"


@tool
def get_weather(city: Literal["Paris", "Rome"]) -> str:
    """The weather in a city."""
    return f"The sky of {city} is blue."


model = ChatOpenAI(model=MODEL)
messages = [HumanMessage("What is the weather in Paris?")]
messages.append(model.bind_tools([get_weather], tool_choice="any", strict=True).invoke(messages))
messages += [get_weather.invoke(call) for call in messages[-1].tool_calls]
model = model.bind_tools([get_weather])
answer = model.invoke(messages)
results = [said.content for said in messages[2:]]
print(json.dumps({"calls": messages[1].tool_calls, "results": results, "answer": answer.content}))
