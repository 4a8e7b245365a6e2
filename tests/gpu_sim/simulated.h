/* State and helpers that the simulated CUDA runtime, driver and libraries share. */
#pragma once
#include <stddef.h>

#define MAX_DEVICES 64

/* What happened on one device. `simulated_read(name, device)` returns a field by its name. */
struct device {
    long contexts;   /* 1 once anything created a context on the device */
    long allocated;  /* bytes of live cudaMalloc blocks */
    long peak;       /* the largest `allocated` so far */
    long mallocs;    /* calls of cudaMalloc */
    long launches;   /* kernel launches, of torch, of Triton and of cuBLAS */
    long syncs;      /* times that the host waited: for a stream, an event, the device, or a blocking copy */
    long uploads;    /* copies from the host to the device */
    long downloads;  /* copies from the device to the host */
};

extern struct device simulated_devices[MAX_DEVICES];

extern int simulated_collectives;          /* of NCCL that hang: libraries.c */
int simulated_count(void);                 /* devices: SIMULATED_CUDA_DEVICES, by default 1 */
int simulated_current(void);               /* this thread's device; 0 in a new thread */
struct device *simulated_use(int number);  /* the device, with a context */
struct device *simulated_here(void);       /* this thread's device, with a context */
void *simulated_handle(void);              /* a new opaque handle that nobody follows */
void *simulated_driver_function(const char *name); /* the driver's function of this name */
int simulated_missing(const char *name);   /* report a call that is not simulated; returns "not supported" */
int simulated_device_of(const void *pointer); /* the device that holds the pointer; -1: none */
