# SPDX-License-Identifier: Apache-2.0
"""Foundations that every package imports: errors, settings, devices, metrics, events, traces."""
