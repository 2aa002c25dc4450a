# SPDX-License-Identifier: Apache-2.0
"""The second stage: hidden rows to codec codes."""
