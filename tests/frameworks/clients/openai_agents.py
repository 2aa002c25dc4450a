# SPDX-License-Identifier: Apache-2.0
"""OpenAI's Agents SDK: an agent that answers, then goes on with the conversation."""

import json

from address import KEY, URL
from agents import Agent, Runner, set_default_openai_api, set_default_openai_client, set_tracing_disabled
from openai import AsyncOpenAI

set_default_openai_client(AsyncOpenAI(base_url=URL, api_key=KEY), use_for_tracing=False)
set_default_openai_api("chat_completions")
set_tracing_disabled(True)
agent = Agent(name="Assistant", instructions="You are a helpful assistant.")
first = Runner.run_sync(agent, "What color is the sky?")
later = Runner.run_sync(agent, [*first.to_input_list(), {"role": "user", "content": "What color is grass?"}])
print(json.dumps({"first": first.final_output, "later": later.final_output}))
