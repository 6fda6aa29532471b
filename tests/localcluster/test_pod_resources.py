"""Addresses and GPUs that an agent hands to its pods."""

import asyncio

import pytest
from ballast_localcluster.nodes.pod_resources.addresses import PodAddresses
from ballast_localcluster.nodes.pod_resources.devices import Devices, NotEnoughDevicesError


def test_two_agents_never_share_addresses():
    """Each claims a block that the kernel gives to one only, and gives it back."""
    first, second = PodAddresses(), PodAddresses()
    try:
        assert first.block != second.block
        taken = [first.take() for _ in range(600)]
        assert len(set(taken)) == 600
        assert all(0 < int(address.split(".")[3]) < 255 for address in taken)
    finally:
        first.close()
        second.close()


def test_addresses_in_use_are_not_given_again():
    """After a whole round of the block, too."""
    addresses = PodAddresses()
    try:
        kept = addresses.take()
        for _ in range(256 * 256):
            address = addresses.take()
            assert address != kept
            addresses.give_back(address)
    finally:
        addresses.close()


def asking(uid, gpus):
    limits = {"limits": {"nvidia.com/gpu": str(gpus)}}
    return {"metadata": {"uid": uid}, "spec": {"containers": [{"name": "c", "resources": limits}]}}


async def test_a_pod_waits_for_gpus_that_are_being_given_back():
    """Its node knows that others have ended before their last process is gone; it does not refuse then."""
    devices = Devices(2)
    devices.take(asking("first", 1))
    devices.take(asking("second", 1))
    devices.ends("first")
    devices.ends("second")
    waiting = asyncio.create_task(devices.take_when_free(asking("third", 2)))
    devices.give_back("first")
    await asyncio.sleep(0)
    assert not waiting.done()
    devices.give_back("second")
    assert await waiting == {"c": (0, 1)}
    assert devices.held == {"third": {"c": (0, 1)}}


async def test_a_pod_does_not_wait_for_gpus_that_no_pod_is_giving_back():
    """Who runs is not waited for, nor is a pod that ended without holding any."""
    devices = Devices(1)
    devices.take(asking("runs", 1))
    devices.ends("held none")
    with pytest.raises(NotEnoughDevicesError, match="0 of 1 free"):
        await devices.take_when_free(asking("late", 1))
