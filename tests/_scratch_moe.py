import sys, time
from tests.pool import Pool
from tests.helpers import prove_case
import math
BASE={"model__name":"qwen3","model__preset":"debug_moe","model__n_layers":2,"model__dim":32,"model__n_heads":4,"model__n_kv_heads":2,"model__head_dim":8,"model__expert_dim":24,"train__global_batch":8,"train__seq_len":16}
def drop(d,*k): return {a:b for a,b in d.items() if a not in k}
def main():
    pool=Pool()
    for line in sys.argv[1:]:
        keys={}
        for w in line.split(","):
            k,v=w.split("="); 
            k={"ds":"parallel__dp_shard","dr":"parallel__dp_replicate","cp":"parallel__cp","tp":"parallel__tp","pp":"parallel__pp","ep":"parallel__ep","zero":"parallel__zero","sched":"parallel__pp_schedule","gb":"train__global_batch","mb":"train__micro_batch","seq":"parallel__sequence"}.get(k,k)
            keys[k]=v
        full={"parallel__dp_shard":1,**BASE,**keys}
        n=math.prod(int(full.get("parallel__"+a,1)) for a in ("pp","dp_replicate","dp_shard","cp","tp"))
        t=time.time()
        try:
            r=pool.run(prove_case,n,full)[0]
            s=str(r).splitlines()
            print(line, "OK" if r.ok else "FAIL", f"{time.time()-t:.1f}s", s[1] if len(s)>1 else "", flush=True)
            if not r.ok: print("\n".join(s[:12]))
        except Exception as e: print(line,"EXC",str(e)[-1500:],flush=True)
    pool.close()
if __name__=="__main__": main()
