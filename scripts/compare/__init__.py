# SPDX-License-Identifier: Apache-2.0
"""Measures one server after another with the same load: settings of stages beside each other, and replicas."""
