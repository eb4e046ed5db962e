// void deep_comm_simt_switch(void** save_stack_pointer, void* load_stack_pointer)
//
// Saves what a callee must preserve (and the floating-point control words) on the running stack,
// and takes the same from the other one. prepare_context() lays out the first frame to match.

#if defined(__ELF__) && !defined(DEEP_COMM_PORTABLE_CONTEXT)
#if defined(__x86_64__)

    .text
    .globl deep_comm_simt_switch
    .hidden deep_comm_simt_switch
    .type deep_comm_simt_switch, @function
    .p2align 4
deep_comm_simt_switch:
#if defined(__CET__)
    endbr64
#endif
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    subq $8, %rsp
    stmxcsr (%rsp)
    fnstcw 4(%rsp)
    movq (%rsp), %rax
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    cmpq %rax, (%rsp)          // loading the control words is slow, and they hardly ever differ
    jne 1f
0:
    addq $8, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    popq %rcx
    jmp *%rcx                  // a `ret` would always miss the return-address predictor here
1:
    ldmxcsr (%rsp)
    fldcw 4(%rsp)
    jmp 0b
    .size deep_comm_simt_switch, . - deep_comm_simt_switch

#elif defined(__aarch64__)

    .text
    .globl deep_comm_simt_switch
    .hidden deep_comm_simt_switch
    .type deep_comm_simt_switch, %function
    .p2align 4
deep_comm_simt_switch:
    sub sp, sp, #176
    stp x19, x20, [sp, #0]
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mrs x9, fpcr
    str x9, [sp, #160]
    mov x10, sp
    str x10, [x0]
    mov sp, x1
    ldr x11, [sp, #160]
    cmp x9, x11
    b.eq 1f
    msr fpcr, x11
1:
    ldp x19, x20, [sp, #0]
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    add sp, sp, #176
    ret
    .size deep_comm_simt_switch, . - deep_comm_simt_switch

#endif
    .section .note.GNU-stack, "", %progbits
#endif
