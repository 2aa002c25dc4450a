# SPDX-License-Identifier: Apache-2.0
"""An audio-aware benchmark: load on a server, and what a listener would have heard of it.

The core is pure: `records` to `metrics` to `summary`, with `player`, `statistics` and `schedule`. `load` asks the
server, `resources` and `server` look at the machine, `report`, `tables` and `plots` write, `cli` is the command.
"""
