# SPDX-License-Identifier: Apache-2.0
"""Rules that decide which stage may use the device next."""
