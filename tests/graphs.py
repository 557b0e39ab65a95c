"""Looks inside: how many graphs are kept for an object, which results do not show."""

from hoglib.capture import capturing


def graphs_of(owner):
    """All graphs that are kept for an object."""
    found = list(capturing._KEPT.get(owner, {}).values())
    return [one for graphs in found if isinstance(graphs, capturing.Graphs) for one in graphs.all()]
