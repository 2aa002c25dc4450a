# SPDX-License-Identifier: Apache-2.0
"""An agent of LiveKit that can look up the weather, and the cities that it was asked about."""

from typing import Literal

from livekit.agents import Agent, function_tool

CITIES = []


class Assistant(Agent):
    """Knows the weather."""

    def __init__(self):
        super().__init__(instructions="You are a helpful assistant.")

    @function_tool
    async def get_weather(self, city: Literal["Paris", "Rome"]) -> str:
        """The weather in a city."""
        CITIES.append(city)
        # The default checkpoint says some words about this. Other results make it babble to its token limit, which ends
        # LiveKit's reply with an error.
        return "Say: The sky is blue."
