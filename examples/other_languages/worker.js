// A worker made from psd's protocol alone, in JavaScript; docs/protocol.md explains it, worker.py is the same in Python.
//
//     npm ci --prefix examples/other_languages
//     psd-run --shards 2 --workers 2 node examples/other_languages/worker.js 20
//
// Each worker pushes its rank + 1 for every element, so that parameters say how much has counted. Shards may be killed, and the
// job may go back to a checkpoint.
'use strict';

const path = require('path');
const grpc = require('@grpc/grpc-js');
const loader = require('@grpc/proto-loader');

// psd's integers fit into numbers; see docs/protocol.md.
const PROTOS = process.env.PROTO_PATH || path.join(__dirname, '..', '..', 'proto');
const FORM = { keepCase: true, longs: Number, enums: String, defaults: true, includeDirs: [PROTOS] };
const { ControlService, DataService } = grpc.loadPackageDefinition(
  loader.loadSync(['psd/v1/control.proto', 'psd/v1/data.proto'], FORM)).psd.v1;
// Blocks have up to 4 MiB, which is gRPC's own limit of a message; and a shard that is back is to be found at once.
const OPTIONS = { 'grpc.max_receive_message_length': -1, 'grpc.max_reconnect_backoff_ms': 500 };
const WAIT_S = 600; // for other workers
const PATIENCE_S = 120; // with a shard that is away

const pause = (seconds) => new Promise((done) => setTimeout(done, seconds * 1000).unref());

// A call that a shard has refused, or that has failed for long; docs/protocol.md says what to do by its reason.
class Refused extends Error {
  constructor(error) {
    super(error.details);
    const [detail] = error.metadata ? error.metadata.get('psd-detail-bin') : [];
    this.reason = (error.metadata && error.metadata.get('psd-reason')[0]) || '';
    this.detail = detail ? JSON.parse(detail) : {};
  }
}

// Makes a call of any kind: `sent` is a message, or an array of them to be streamed; answers alike.
function call(client, method, sent) {
  const { requestStream, responseStream } = client[method];
  const options = { deadline: Date.now() + WAIT_S * 1000 };
  return new Promise((resolve, reject) => {
    const end = (error, reply) => (error ? reject(error) : resolve(reply));
    const start = client[method].bind(client);
    const stream = requestStream
      ? (responseStream ? start(options) : start(options, end))
      : (responseStream ? start(sent, options) : start(sent, options, end));
    if (requestStream) {
      sent.forEach((frame) => stream.write(frame));
      stream.end();
    }
    if (responseStream) {
      const frames = [];
      stream.on('data', (frame) => frames.push(frame)).on('end', () => resolve(frames)).on('error', reject);
    }
  });
}

// A block's numbers: those of its segments, end to end.
function payload(block, values) {
  return Buffer.concat(block.tensors.map((tensor, i) => {
    const run = values[tensor].subarray(block.starts[i], block.starts[i] + block.lengths[i]);
    return Buffer.from(run.buffer, run.byteOffset, run.byteLength);
  }));
}

// One worker of a synchronous job of float32 tensors. They lie flat in `values`: first the initial ones, then the job's.
class Worker {
  constructor(servers, rank, spec, values) {
    Object.assign(this, { rank, spec, values, run_id: '', session: 0, timeline: 0, clock: 0, lease_s: 10, cuts: {} });
    const credentials = grpc.credentials.createInsecure();
    this.control = servers.map((server) => new ControlService(server, credentials, OPTIONS));
    this.data = servers.map((server) => new DataService(server, credentials, OPTIONS));
    this.shards = servers.map((_, shard) => shard);
    this.callers = servers.map(() => ({})); // run, life of the shard, rank, session: who speaks to whom
    this.connection = 1 + Math.floor(Math.random() * Number.MAX_SAFE_INTEGER);
    this.shards.forEach((shard) => this.beat(shard));
  }

  // The answer to a call, which is made until a shard gives one, in whatever life: a push counts once all the same.
  async ask(shard, method, request) {
    const until = Date.now() + PATIENCE_S * 1000;
    for (;;) {
      try {
        const client = this.control[shard][method] ? this.control[shard] : this.data[shard];
        return await call(client, method, request(this.callers[shard]));
      } catch (error) {
        const refused = new Refused(error);
        if (refused.reason === 'ShardRestarted') {
          await this.join(shard, true);
        } else if (['', 'Draining'].includes(refused.reason) && Date.now() < until) { // the connection is broken, or will be
          await new Promise((done) => setTimeout(done, 100));
        } else {
          throw refused;
        }
      }
    }
  }

  // Enters as a new session, which shard 0 issues; or goes on with the present one at a shard that was restarted.
  async join(shard, resume = false) {
    const request = {
      run_id: this.run_id, shard_index: shard, shard_count: this.shards.length, rank: this.rank, resume,
      world_size: this.spec.world_size, session: shard || resume ? this.session : 0, timeline: this.timeline,
      connection: this.connection,
    };
    const reply = await this.ask(shard, 'Join', () => request);
    if (!resume) Object.assign(this, { run_id: reply.run_id, session: reply.session, lease_s: reply.lease_s });
    if (reply.session === this.session) { // else the program has joined anew meanwhile
      const { run_id, incarnation, session } = reply;
      this.callers[shard] = { run_id, incarnation, rank: this.rank, session };
    }
    return reply;
  }

  // Joins, declares the job, and fetches its values: at first, and when it has gone back to a checkpoint.
  async enter() {
    for (;;) {
      try {
        Object.assign(this, { clock: 0, cuts: {} }); // what heartbeats say until all shards have told the clock
        const joined = [];
        for (const shard of this.shards) joined.push(await this.join(shard));
        const [first] = joined;
        if (joined.some((r) => r.is_tentative || r.timeline !== first.timeline || r.checkpoint !== first.checkpoint)) {
          await this.bringTogether(joined);
          continue;
        }
        Object.assign(this, { timeline: first.timeline, orders: first.orders, barriers: 0 });
        this.clock = this.since = Math.max(...joined.map((reply) => reply.clock));
        await this.declare();
        return await this.pull();
      } catch (error) {
        if (error.reason !== 'RolledBack') throw error; // else another worker was bringing them together
      }
    }
  }

  // Has all shards go back to the checkpoint with which one of them, which has lost its memory, has come back.
  async bringTogether(joined) {
    const latest = Math.max(...joined.map((reply) => reply.timeline));
    const tentative = joined.filter((reply) => reply.is_tentative);
    const begun = tentative.length ? tentative : joined.filter((reply) => reply.timeline === latest);
    const checkpoint = begun.map((reply) => reply.checkpoint).filter(Boolean).sort()[0];
    const { workers } = joined.find((reply) => !reply.is_tentative) || { workers: [] };
    const timeline = Math.max(latest, this.timeline) + 1;
    for (const shard of this.shards) {
      const { incarnation } = joined[shard];
      await this.ask(shard, 'Rollback', () => ({ run_id: this.run_id, checkpoint, timeline, workers, incarnation }));
    }
  }

  // Agrees on the job, and learns where its elements are; provides the initial values if this worker is chosen to.
  async declare() {
    const replies = [];
    for (const shard of this.shards) {
      replies.push(await this.ask(shard, 'Declare', (caller) => ({ caller, spec: this.spec })));
    }
    const [{ layout_digest, initializer, choice }] = replies;
    this.layout_digest = layout_digest;
    this.clock = Math.max(this.clock, ...replies.map((reply) => reply.clock));
    this.blocks = replies.map((reply) => reply.layout.blocks);
    for (const shard of initializer ? [...this.shards.slice(1), 0] : []) { // shard 0 last: when it has its values, so have all
      await this.ask(shard, 'Initialize', (caller) => {
        const frames = this.blocks[shard].map((block) => ({ block: block.index, payload: payload(block, this.values) }));
        return [{ caller, layout_digest, choice, ...frames[0] }, ...frames.slice(1)];
      });
    }
  }

  // Fetches all parameters as of the worker's clock.
  async pull() {
    const { clock, layout_digest } = this;
    for (const shard of this.shards) {
      this.keep(shard, await this.ask(shard, 'Pull', (caller) => ({ caller, clock, layout_digest })));
    }
  }

  // Puts the numbers of blocks to where they belong.
  keep(shard, frames) {
    for (const frame of frames) {
      const block = this.blocks[shard].find((each) => each.index === frame.block);
      const numbers = new Float32Array(new Uint8Array(frame.payload).buffer);
      let at = 0;
      block.tensors.forEach((tensor, i) => {
        this.values[tensor].set(numbers.subarray(at, at + block.lengths[i]), block.starts[i]);
        at += block.lengths[i];
      });
    }
  }

  // Sends a gradient, and fetches the parameters after its round; `scalars` has a list of numbers for each group.
  async pushPull(gradients, scalars) {
    const ends = await Promise.allSettled(this.shards.map(async (shard) => {
      const blocks = this.blocks[shard].filter((block) => block.is_trained);
      if (!blocks.length) return this.clock + 1;
      const frames = await this.ask(shard, 'PushPull', (caller) => this.pushFrames(caller, blocks, gradients, scalars));
      const { push } = frames.pop();
      this.keep(shard, frames);
      this.cuts[shard] = push.cuts;
      if (shard === 0) this.orders = push.orders;
      return push.clock;
    }));
    const failed = ends.find((end) => end.reason); // no call is under way any more: it would go on in the next session
    if (failed) throw failed.reason;
    const clocks = ends.map((end) => end.value);
    this.clock = Math.max(...clocks);
    if (Math.min(...clocks) < this.clock) await this.pull(); // it came late at one shard, and in time at another
  }

  // One frame for each block. (rank, session, clock) is the push's name, however often it is sent.
  pushFrames(caller, blocks, gradients, scalars) {
    const { clock, since, layout_digest } = this;
    const frames = blocks.map((block) => ({ block: block.index, payload: payload(block, gradients) }));
    const values = scalars.map((numbers) => ({ values: numbers }));
    frames[0].push = { caller, clock, since, layout_digest, weight: 1, scalars: values, cuts: this.carried() };
    frames[frames.length - 1].last = true;
    return frames;
  }

  // The checkpoints that are announced, which workers carry from shard to shard.
  carried() {
    const cuts = Object.values(this.cuts).flat();
    return [...new Map(cuts.map((cut) => [cut.id, cut])).values()].slice(-8);
  }

  // Waits until all workers are there.
  async barrier(name) {
    const seq = ++this.barriers;
    await this.ask(0, 'Barrier', (caller) => ({ caller, name, seq }));
  }

  // Ends this worker's part: nobody waits for it any more.
  async leave() {
    const left_at = Date.now() / 1000; // the same for all shards: the last checkpoint has it
    for (const shard of this.shards) {
      await this.ask(shard, 'Leave', (caller) => ({ caller, left_at }));
    }
  }

  // Sends heartbeats, whatever else waits: a shard that hears nothing ends the session.
  async beat(shard) {
    for (;;) {
      await pause(this.lease_s / 5);
      const { session } = this.callers[shard];
      if (!session) continue;
      try {
        const reply = await this.ask(shard, 'Heartbeat', (caller) => ({ caller, clock: this.clock, cuts: this.carried() }));
        if (session === this.session) this.cuts[shard] = reply.cuts; // else the job has gone back, before that checkpoint
      } catch (error) {
        // The program's next call hears it, too.
      }
    }
  }
}

async function main() {
  const rank = Number(process.env.PSD_RANK);
  const sizes = { w: 300_000, b: 7 };
  const spec = {
    world_size: Number(process.env.PSD_WORLD_SIZE), mode: 'CONSISTENCY_MODE_SYNC', reduction: 'REDUCTION_SUM',
    groups: [{ rule: 'sgd' }],
    tensors: Object.entries(sizes).map(([name, size]) => ({ name, shape: [size], dtype: 'DTYPE_FLOAT32' })),
  };
  const values = Object.values(sizes).map((size) => new Float32Array(size));
  const gradients = Object.values(sizes).map((size) => new Float32Array(size).fill(rank + 1));
  const worker = new Worker(process.env.PSD_SERVERS.split(','), rank, spec, values);
  await worker.enter();
  const isOver = () => worker.orders && worker.orders.ends_at && worker.orders.ends_at <= worker.clock;
  while (worker.clock < Number(process.argv[2]) && !isOver()) {
    try {
      await worker.pushPull(gradients, [[1, 0, 0, 0]]); // lr, momentum, dampening, weight_decay
    } catch (error) {
      if (error.reason !== 'RolledBack') throw error;
      await worker.enter();
    }
    console.log(`step ${worker.clock}`);
  }
  await worker.barrier('end');
  await worker.leave();
  console.log(`values [${[...new Set(values.flatMap((tensor) => [...tensor]))].map((value) => value.toFixed(1))}]`);
  process.exit(0);
}

main().catch((error) => {
  console.error(error.reason || '', error);
  process.exit(1);
});
