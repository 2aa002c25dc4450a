# SPDX-License-Identifier: Apache-2.0
"""Soak: many requests of all kinds against one server, disturbed in every way a client or a machine can."""
