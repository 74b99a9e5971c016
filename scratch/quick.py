import sys, time, torch, traceback
sys.path.insert(0,'benchmarks')
import nets, methods
torch.backends.cuda.matmul.allow_tf32=True; torch.backends.cudnn.allow_tf32=True; torch.backends.cudnn.benchmark=True
D={'bf16':torch.bfloat16,'float32':torch.float32}
names=sys.argv[1].split(','); dts=sys.argv[2].split(','); ms=sys.argv[3].split(',')
for name in names:
    for dt in dts:
        net,xs,ys=nets.problem(name,small=False,dtype=D[dt],device='cuda'); w=nets.TABLE[name].weight
        base=None; line=f'{name:10s} {dt:8s} '
        for m in ms:
            try:
                t0=time.time()
                step=methods.build(m,net,xs[0],ys[0],w)
                for i in range(5):
                    net.zero_grad(set_to_none=True); step(xs[0],ys[0])
                torch.cuda.synchronize(); tw=time.time()-t0
                torch.cuda.reset_peak_memory_stats()
                ts=[]
                for i in range(12):
                    net.zero_grad(set_to_none=True)
                    a=torch.cuda.Event(True); b=torch.cuda.Event(True)
                    torch.cuda.synchronize(); a.record(); c=time.perf_counter(); step(xs[0],ys[0]); c=time.perf_counter()-c; b.record(); torch.cuda.synchronize(); ts.append((a.elapsed_time(b),c*1e3))
                ts.sort(); t,c=ts[len(ts)//2]
                base=base or t
                line+=f'| {m} {t:.2f}ms ({t/base:.2f}x) host {c:.1f} mem {torch.cuda.max_memory_allocated()>>20}M warm {tw:.0f}s '
                del step
            except Exception as e:
                line+=f'| {m} FAILED {type(e).__name__} {str(e)[:200]} '; traceback.print_exc()
        print(line,flush=True)
        del net,xs,ys; torch.cuda.empty_cache()
