"""Which destination is fed from where.

Without relay every destination is fed from the source, in one run that reads each object once. With relay the
destinations are fed one after another, and one that is whole may serve the next: each is fed from the place
that costs least to read and, of those, was fastest last time. The order is a shortest-first walk: at every
step the cheapest pair of a place that has the dataset and a place that lacks it, by the price of what that
place needs.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from datasync.errors import DatasyncError, NotFoundError, UsageError
from datasync.ops import receipts
from datasync.ops.targets import Missing, Target
from datasync.replicate.catalog import describe, learn
from datasync.replicate.destination import compared
from datasync.replicate.limits import identity
from datasync.replicate.options import ALREADY, PUBLISHED, Options, Outcome, Stop
from datasync.replicate.run import replicate

if TYPE_CHECKING:
    from datasync.config import Config
    from datasync.storage.base import Store

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Hop:
    """One step of a relay: `to` is fed from `source`.

    Args:
        source, to (str): Names of places.
        price (float): Of reading a GiB at `source`. Default: ``0``.
        rate (float | None): Bytes a second that were measured on this way, or else at `to`. Default: unknown.
    """

    source: str
    to: str
    price: float = field(default=0.0, compare=False)
    rate: float | None = field(default=None, compare=False)


def plan_relay(source: str, to: Sequence[str], cost: Callable[[str, str], tuple[float, float]]) -> list[Hop]:
    """The order in which destinations are fed, and from where. Pure.

    Args:
        source (str): Where the dataset is.
        to (Sequence[str]): Where it goes, in the order of preference among equals.
        cost (Callable): (price, seconds a byte) of reading at one place and writing at another.
    """
    have, lack, hops = [source], list(to), []
    while lack:
        choices = [(cost(a, b), have.index(a), lack.index(b), a, b) for a in have for b in lack]
        *_, a, b = min(choices, key=lambda choice: choice[:3])
        hops.append(Hop(a, b))
        have.append(b)
        lack.remove(b)
    return hops


def replicate_all(
    target: Target | Missing, options: Options, stop: Stop, *, relay: bool, config: Config
) -> Iterator[Outcome]:
    """Replicate a target to all its destinations, directly or from one to the next.

    What is wrong with one target is told in its outcomes, so that others can go on.

    Raises:
        UsageError: The combination makes no sense.
    """
    if isinstance(target, Missing):
        for place in target.to:
            yield Outcome(name=target.name, source="", destination=place, url="", error=target.error)
        return
    done: set[str] = set()
    try:
        for outcome in _replicate(target, options, stop, relay=relay, config=config):
            done.add(outcome.destination)
            yield outcome
    except UsageError:
        raise
    except DatasyncError as error:
        for place, store in target.to.items():
            if place not in done:
                yield Outcome(
                    name=target.name, source=target.source.url, destination=place, url=store.url, error=error
                )


def _replicate(
    target: Target, options: Options, stop: Stop, *, relay: bool, config: Config
) -> Iterator[Outcome]:
    if options.require_signature is None and target.require_signature is not None:
        options = replace(options, require_signature=target.require_signature)
    if target.implied:
        places = (target.source, *target.to.values(), *target.fallbacks)
        options = replace(options, akin=frozenset(map(identity, places)))
    if not relay or len(target.to) < 2:
        yield from _fed(target, target.to, options, stop)
        return
    if options.dry_run:
        feeders = {hop.to: hop.source for hop in hops_of(target, config, as_tree=options.as_tree)}
        for outcome in _fed(target, target.to, options, stop):
            outcome.feeder, outcome.paid_bytes = feeders[outcome.destination], outcome.to_copy_bytes
            yield outcome
        return
    origin = origin_of(target)
    stores = {origin: target.source, **target.to}
    good = {origin}
    for hop in hops_of(target, config, as_tree=options.as_tree):
        feeder = hop.source if hop.source in good else origin
        to = {hop.to: stores[hop.to]}
        try:
            if feeder == origin:
                outcomes = _fed(target, to, options, stop)
            else:
                others = (target.source, *target.fallbacks)
                outcomes = replicate(
                    stores[feeder], to, name=target.name, options=options, stop=stop, fallbacks=others
                )
        except UsageError:
            raise
        except DatasyncError as error:
            if feeder == origin:
                raise
            log.warning("%s cannot feed %s any more: %s", feeder, hop.to, error.message)
            feeder = origin
            outcomes = _fed(target, to, options, stop)
        for outcome in outcomes:
            outcome.feeder = feeder
            if outcome.state in (ALREADY, PUBLISHED):
                good.add(hop.to)
            yield outcome


def _fed(target: Target, to: Mapping[str, Store], options: Options, stop: Stop) -> list[Outcome]:
    """Destinations fed from the source itself."""
    return replicate(
        target.source, to, name=target.name, options=options, stop=stop, fallbacks=target.fallbacks
    )


def origin_of(target: Target) -> str:
    """What the source is called in a relay."""
    return target.cluster or target.source.url


def hops_of(target: Target, config: Config, *, as_tree: bool = False) -> list[Hop]:
    """The relay of a target, by the prices of the configuration and the rates of earlier runs."""
    origin = origin_of(target)
    rates = _rates({origin: target.source, **target.to})

    def price(a: str) -> float:
        return config.clusters[a].egress_per_gib if a in config.clusters else 0.0

    def rate(a: str, b: str) -> float | None:
        return rates.get((a, b)) or rates.get(("", b))

    # Where reading costs something, who needs least goes first, and then feeds the others.
    needs = _needs(target, as_tree=as_tree) if any(map(price, (origin, *target.to))) else {}

    def cost(a: str, b: str) -> tuple[float, float]:
        known = rate(a, b)
        return price(a) * needs.get(b, 1), 1 / known if known else math.inf

    hops = plan_relay(origin, list(target.to), cost)
    return [replace(hop, price=price(hop.source), rate=rate(hop.source, hop.to)) for hop in hops]


def _needs(target: Target, *, as_tree: bool) -> Mapping[str, int]:
    """Bytes that each destination needs; of one that cannot be asked, all."""
    catalog = describe(target.source, target.name, as_tree=as_tree)
    found = {}
    for place, store in target.to.items():
        try:
            receipt = receipts.read(store)
            learn(catalog, store, receipt)
            found[place] = compared(catalog, store, receipt, {}).bytes
        except DatasyncError as error:
            log.info("what %s needs is not known: %s", place, error.message)
            found[place] = catalog.total_bytes
    return found


def _rates(places: Mapping[str, Store]) -> Mapping[tuple[str, str], float]:
    """Bytes a second of the last run that copied from one place to another; from ``""``: from anywhere."""
    names = {identity(store): place for place, store in places.items()}
    found: dict[tuple[str, str], float] = {}
    for place, store in places.items():
        try:
            earlier = receipts.read_all(store, damaged_too=True)
        except NotFoundError:
            continue
        except DatasyncError as error:  # of a place that is dead, its own turn will tell
            log.info("the last rate at %s is not known: %s", place, error.message)
            continue
        for receipt in earlier:
            rate = receipts.rate(receipt)
            source = names.get((receipt.source["endpoint"], receipt.source["url"]))
            if rate:
                found["", place] = rate
            if rate and source is not None:
                found[source, place] = rate
    return found
