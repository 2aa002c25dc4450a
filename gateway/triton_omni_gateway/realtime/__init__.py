# SPDX-License-Identifier: Apache-2.0
"""OpenAI's Realtime API over a WebSocket: a session holds a conversation, hears sound, and answers while it is asked.

`endpoint.py` takes connections, `session.py` is one of them; `config.py` and `events.py` are what clients may send.
"""
