import sys,time,logging
sys.path.insert(0,'tests/protocol')
from setting import *
import green, worker_process, shard_process
from world import *
logging.disable(logging.CRITICAL)
setting=Setting('x',consistency=sys.argv[1], aggregation=sys.argv[2], budget=0)
with green.green(*worker_process.stand_ins(), *shard_process.stand_ins()):
    w=World(setting)
    s=w.initial()
    t=time.time()
    for i in range(400):
        o=[a for a,c in w.options(s) if c==0]
        if not o: break
        r=w.take(s,o[0])
        print(o[0], len(o), r.texts, r.wrong)
        s=r.state
    print(time.time()-t, [n.view.ended for n in s.workers], [n.view.history for n in s.shards])
    w.close()
