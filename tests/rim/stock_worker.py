"""A worker made from the .proto files alone: stock generated stubs, gRPC and the standard library; no psd code.

Run as: python -I stock_worker.py STUBS ADDRESS RANK. STUBS is a folder with what protoc and its gRPC plugin generated. Writes
one JSON object, which tests/rim/test_rim_stock_client.py compares with hand-computed numbers.
"""

import json
import struct
import sys

sys.path.insert(0, sys.argv[1])

import grpc

from psd.v1 import control_pb2, control_pb2_grpc, data_pb2, data_pb2_grpc, job_pb2

ADDRESS, RANK = sys.argv[2], int(sys.argv[3])
TIMEOUT_S = 100


def packed(values):
    return struct.pack(f"<{len(values)}f", *values)


def unpacked(payload):
    return list(struct.unpack(f"<{len(payload) // 4}f", payload))


def main():
    with grpc.insecure_channel(ADDRESS) as channel:
        control, data = control_pb2_grpc.ControlServiceStub(channel), data_pb2_grpc.DataServiceStub(channel)
        joined = control.Join(control_pb2.JoinRequest(shard_count=1, rank=RANK, world_size=2, host="stock"), timeout=TIMEOUT_S)
        caller = job_pb2.Caller(run_id=joined.run_id, incarnation=joined.incarnation, rank=RANK, session=joined.session)
        spec = job_pb2.JobSpec(
            world_size=2,
            mode=job_pb2.CONSISTENCY_MODE_SYNC,
            reduction=job_pb2.REDUCTION_MEAN,
            groups=[job_pb2.GroupSpec(rule="sgd", flags=["momentum"])],
            tensors=[
                job_pb2.TensorSpec(name="w", shape=[2, 2], dtype=job_pb2.DTYPE_FLOAT32),
                job_pb2.TensorSpec(name="b", dtype=job_pb2.DTYPE_FLOAT32),
            ],
        )
        declared = control.Declare(control_pb2.DeclareRequest(caller=caller, spec=spec), timeout=TIMEOUT_S)
        digest = declared.layout_digest
        if declared.initializer:
            first = data_pb2.InitializeFrame(
                caller=caller, layout_digest=digest, choice=declared.choice, block=0, payload=packed([1, 2, 3, 4, 5])
            )
            assert data.Initialize(iter([first]), timeout=TIMEOUT_S).accepted

        def pull(clock):
            request = data_pb2.PullRequest(caller=caller, clock=clock, layout_digest=digest)
            return [(f.block, f.version, unpacked(f.payload)) for f in data.Pull(request, timeout=TIMEOUT_S)]

        def frame(clock, gradient, present=b""):
            header = data_pb2.PushHeader(
                caller=caller,
                clock=clock,
                weight=1 + 2 * RANK,
                layout_digest=digest,
                scalars=[data_pb2.GroupScalars(values=[0.5, 0.5, 0.0, 0.0])],
            )
            return data_pb2.PushFrame(push=header, block=0, present=present, last=True, payload=packed(gradient))

        result = {"initializer": declared.initializer, "pulls": [pull(0)]}
        pushed = data.Push(iter([frame(0, [4.0 * RANK] * 5)]), timeout=TIMEOUT_S)
        result["counted"] = [pushed.blocks_counted]
        result["pulls"].append(pull(1))
        # Only "b" has a gradient in this round; "w" is not stepped, and its momentum stays.
        answer = list(data.PushPull(iter([frame(1, [0, 0, 0, 0, 8.0], present=b"\x02")]), timeout=TIMEOUT_S))
        result["counted"].append(answer[-1].push.blocks_counted)
        result["pulls"].append([(f.block, f.version, unpacked(f.payload)) for f in answer[:-1]])
        # A push that is sent again, because its reply might have been lost.
        result["duplicate"] = data.Push(
            iter([frame(1, [0, 0, 0, 0, 8.0], present=b"\x02")]), timeout=TIMEOUT_S
        ).blocks_duplicate
        result["waits"] = len(control.Heartbeat(control_pb2.HeartbeatRequest(caller=caller, clock=2), timeout=TIMEOUT_S).waits)
        barrier = control_pb2.BarrierRequest(caller=caller, name="end", seq=1)
        result["generation"] = control.Barrier(barrier, timeout=TIMEOUT_S).generation
        control.Leave(control_pb2.LeaveRequest(caller=caller), timeout=TIMEOUT_S)
        try:
            data.Push(iter([frame(2, [0.0] * 5)]), timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            result["after_leave"] = error.code().name, dict(error.trailing_metadata())["psd-reason"]
    sys.stdout.write(json.dumps(result))


main()
