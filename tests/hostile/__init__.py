# SPDX-License-Identifier: Apache-2.0
"""Hostile input of every kind against the code that first sees it."""
