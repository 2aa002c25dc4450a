# SPDX-License-Identifier: Apache-2.0
"""The program that examines running servers."""
