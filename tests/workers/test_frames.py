"""The wire: what is sent arrives, and what is no frame of ours is refused before anything is allocated for it."""

from __future__ import annotations

import fcntl
import resource
import socket
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel_runtime.requests.requests import ConditioningRef, Forward
from workers.wire.connection import Connection, ConnectionClosed
from workers.wire.frames import (
    MAX_HEADER,
    MAX_PAYLOAD,
    PREFIX,
    FrameError,
    decode_header,
    decode_prefix,
    encode_header,
    encode_prefix,
)
from workers.wire.protocol import VERSION, Heartbeat, Job, TensorSpec
from workers.wire.tensors import pack, unpack


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    yield Connection(ours), Connection(theirs)
    ours.close()
    theirs.close()


def a_job(**tensors: torch.Tensor):
    specs, buffers = pack(tensors)
    return Job(1, Forward("m", ConditioningRef(1)), specs), buffers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.uint8])
def test_tensors_of_every_travelling_type_arrive_unchanged(pair, dtype):
    tensors = {"x": (torch.randn(2, 3, 5) * 10).to(dtype), "empty": torch.empty(0, 4, dtype=dtype)}
    tensors["strided"] = tensors["x"].transpose(0, 2)
    job, buffers = a_job(**tensors)
    sender = threading.Thread(target=pair[0].send, args=(job, buffers))
    sender.start()
    frame = pair[1].receive()
    sender.join()
    assert frame.message == job
    arrived = unpack(frame.message.tensors, frame.payload)
    assert arrived.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(arrived[name], tensor)


def test_a_type_that_does_not_travel_is_refused_by_name():
    with pytest.raises(TypeError, match="'z'.*complex64"):
        pack({"z": torch.zeros(2, dtype=torch.complex64)})


def test_a_process_with_more_files_than_select_takes_waits_for_a_reader_that_is_slow(pair):
    ours, theirs = pair
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1100), hard))
    try:
        with socket.socket(fileno=fcntl.fcntl(ours._socket, fcntl.F_DUPFD, 1024)) as high:
            job, buffers = a_job(x=torch.zeros(2**20))  # more than the sockets hold
            reader = threading.Thread(target=theirs.receive)
            stuck: list[None] = []

            def begin() -> None:
                if not stuck:
                    reader.start()
                stuck.append(None)

            Connection(high).send(job, buffers, begin)
            reader.join()
            assert stuck
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_connection_that_another_thread_has_closed_sends_no_more(pair):
    pair[0].close()
    with pytest.raises(ConnectionClosed):
        pair[0].send(*a_job(x=torch.zeros(3)))


def test_an_end_of_file_in_the_middle_of_a_frame_closes_the_connection(pair):
    header = encode_header(Heartbeat(0, 1))
    pair[0]._socket.sendall((encode_prefix(header, 0) + header)[:-1])
    pair[0].close()
    with pytest.raises(ConnectionClosed):
        pair[1].receive()


@pytest.mark.parametrize(
    ("prefix", "says"),
    [
        (PREFIX.pack(b"HTTP", VERSION, 10, 0), "not of this protocol"),
        (PREFIX.pack(b"PDiT", VERSION + 1, 10, 0), f"version {VERSION + 1}"),
        (PREFIX.pack(b"PDiT", VERSION, MAX_HEADER + 1, 0), "over the caps"),
        (PREFIX.pack(b"PDiT", VERSION, 10, MAX_PAYLOAD + 1), "over the caps"),
    ],
)
def test_a_prefix_that_cannot_be_ours_is_refused(prefix, says):
    with pytest.raises(FrameError, match=says):
        decode_prefix(prefix)


@pytest.mark.parametrize(
    "spec",
    [
        TensorSpec("x", "float32", (1 << 40,)),
        TensorSpec("x", "float32", (-1, 4)),
        TensorSpec("x", "float32", (1,) * 40),
        TensorSpec("x", "object", (1,)),
    ],
)
def test_a_tensor_that_cannot_be_true_is_refused_before_memory_is_taken(spec):
    header = encode_header(Job(1, Forward("m", ConditioningRef(1)), (spec,)))
    with pytest.raises(FrameError):
        decode_header(header, 0)


def test_a_payload_that_is_not_what_the_tensors_need_is_refused():
    job, _ = a_job(x=torch.zeros(4))
    with pytest.raises(FrameError, match="announces 15 payload bytes, but its tensors need 16"):
        decode_header(encode_header(job), 15)


@settings(max_examples=500, deadline=None)
@given(st.binary(max_size=200))
def test_no_bytes_crash_the_header_decoder(data):
    try:
        decode_header(data, 0)
    except FrameError:
        return
    decode_header(data, 0)  # the rare accident that is a message stays one


@settings(max_examples=500, deadline=None)
@given(st.integers(0, 60), st.integers(0, 255))
def test_no_flipped_byte_of_a_real_header_crashes_the_decoder(position, value):
    job, _ = a_job(x=torch.zeros(2, 3))
    header = bytearray(encode_header(job))
    header[position % len(header)] = value
    try:
        decode_header(bytes(header), 24)
    except FrameError as error:
        assert error.fix  # typed, nothing else escapes
