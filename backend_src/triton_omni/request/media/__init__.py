# SPDX-License-Identifier: Apache-2.0
"""Encoded media of a request in, arrays as HF's processor takes them out.

Limits are checked on headers before memory is spent, and again while decoding, since headers lie. The content of a
medium decides its kind, never a declared name. This package knows nothing of chats, tokens or vLLM.

It imports nothing by itself, since the process that forks decoders imports it and should load only their module.
"""
