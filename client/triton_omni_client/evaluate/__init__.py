# SPDX-License-Identifier: Apache-2.0
"""Judges a server's replies: intelligible speech, pictures and sounds understood, and the effect of settings.

`words` and `sound` measure one reply, `figures` sums replies up, `run` asks and judges, `cli` is the command.
"""
