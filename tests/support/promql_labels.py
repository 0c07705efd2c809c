"""Which labels a PromQL expression's result has, by what service/metrics.py declares.

Raises AssertionError for a metric or label that is not declared, a value that its label never has, and a pair of
vectors whose labels cannot match.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import promql_parser as promql
from reference import values_of

from nybble.service.app import ROUTES
from nybble.service.metrics import METRICS, PREFIX

# What Prometheus adds to every series that it scrapes.
TARGET = frozenset(("instance", "job"))
SET_OPERATORS = ("and", "or", "unless")
COMPARISONS = ("==", "!=", ">", "<", ">=", "<=")

Series = Mapping[str, frozenset[str]]


def declared() -> dict[str, frozenset[str]]:
    """Every series that a scrape can have, with its labels."""
    series = {"up": TARGET}
    for metric in METRICS:
        names = [(PREFIX + metric.name, TARGET.union(metric.labels))]
        names += [(alias.name, TARGET.union(alias.labels, ("model_name",))) for alias in metric.aliases]
        for name, labels in names:
            if metric.kind == "histogram":
                series |= {f"{name}_bucket": labels | {"le"}, f"{name}_sum": labels, f"{name}_count": labels}
            else:
                series[name] = labels
    return series


def labels_of(expr: str, series: Series) -> frozenset[str]:
    return _labels(promql.parse(expr), series)


def operands(expr: str) -> list[str]:
    """What an alert compares and combines: the vectors on either side of comparisons and of and, or, unless."""
    return _operands(promql.parse(expr))


def _operands(node: Any) -> list[str]:
    match node:
        case promql.ParenExpr():
            return _operands(node.expr)
        case promql.BinaryExpr() if str(node.op).strip() in SET_OPERATORS + COMPARISONS:
            return _operands(node.lhs) + _operands(node.rhs)
        case _ if _is_number(node):
            return []
    return [str(node)]


def _labels(node: Any, series: Series) -> frozenset[str]:
    match node:
        case promql.VectorSelector():
            return _selected(node, series)
        case promql.MatrixSelector():
            return _labels(node.vector_selector, series)
        case promql.Call():
            return _called(node, series)
        case promql.AggregateExpr():
            return _aggregated(node, series)
        case promql.BinaryExpr():
            return _combined(node, series)
        case promql.ParenExpr() | promql.UnaryExpr() | promql.SubqueryExpr():
            return _labels(node.expr, series)
    raise AssertionError(f"{node}: not known here")


def _selected(node: Any, series: Series) -> frozenset[str]:
    assert node.name in series, f"{node.name}: service/metrics.py does not declare it"
    labels = series[node.name]
    for matcher in node.matchers.matchers:
        assert matcher.name in labels, f"{node}: {node.name} has no label {matcher.name}"
        accepted = _accepted(node.name, matcher.name)
        for value in matcher.value.split("|"):
            wild = value.startswith("$") or any(sign in value for sign in ".*+[")
            assert wild or not accepted or value in accepted, f"{node}: {matcher.name} is never {value!r}"
    return labels


def _accepted(name: str, label: str) -> tuple[str, ...]:
    if label == "route":
        return tuple(route for _, route, _ in ROUTES)
    return values_of(name.removeprefix(PREFIX).removesuffix("_bucket"), label)


def _called(node: Any, series: Series) -> frozenset[str]:
    vectors = [argument for argument in node.args if not _is_number(argument)]
    (labels,) = (_labels(vector, series) for vector in vectors)
    if node.func.name == "absent":
        (vector,) = vectors
        return frozenset(matcher.name for matcher in vector.matchers.matchers)
    if node.func.name == "histogram_quantile":
        assert "le" in labels, f"{node}: needs the label le"
        return labels - {"le"}
    return labels


def _aggregated(node: Any, series: Series) -> frozenset[str]:
    inner = _labels(node.expr, series)
    if node.modifier is None:
        return frozenset()
    named = frozenset(node.modifier.labels)
    assert named <= inner, f"{node}: has no labels {sorted(named - inner)}"
    return named if node.modifier.type == promql.AggModifierType.By else inner - named


def _combined(node: Any, series: Series) -> frozenset[str]:
    if _is_number(node.lhs) or _is_number(node.rhs):
        return _labels(node.rhs if _is_number(node.lhs) else node.lhs, series)
    left, right = _labels(node.lhs, series), _labels(node.rhs, series)
    matching = node.modifier and node.modifier.matching
    if not matching:
        assert left == right, f"{node}: {sorted(left)} never match {sorted(right)}"
        return left
    assert matching.type == promql.LabelModifierType.Include, f"{node}: write on (...)"
    on = frozenset(matching.labels)
    assert on <= left & right, f"{node}: not both sides have {sorted(on)}"
    return left if str(node.op).strip() in SET_OPERATORS + COMPARISONS else on


def _is_number(node: Any) -> bool:
    match node:
        case promql.NumberLiteral():
            return True
        case promql.ParenExpr() | promql.UnaryExpr():
            return _is_number(node.expr)
        case promql.BinaryExpr():
            return _is_number(node.lhs) and _is_number(node.rhs)
    return False
