BEGIN TRANSACTION;
CREATE TABLE hadagen_claims (
	id INTEGER NOT NULL, 
	problem_id INTEGER NOT NULL, 
	arch VARCHAR NOT NULL, 
	gpu VARCHAR NOT NULL, 
	work VARCHAR NOT NULL, 
	owner VARCHAR NOT NULL, 
	expires DOUBLE NOT NULL, 
	CONSTRAINT pk_hadagen_claims PRIMARY KEY (id), 
	CONSTRAINT uq_hadagen_claims UNIQUE (problem_id, arch, gpu, work), 
	CONSTRAINT fk_hadagen_claims_problem_id FOREIGN KEY(problem_id) REFERENCES hadagen_problems (id)
);
CREATE TABLE hadagen_environments (
	id INTEGER NOT NULL, 
	gpu VARCHAR NOT NULL, 
	compute_capability VARCHAR NOT NULL, 
	sms INTEGER NOT NULL, 
	l2_bytes BIGINT NOT NULL, 
	driver VARCHAR NOT NULL, 
	cuda VARCHAR NOT NULL, 
	nvcc VARCHAR NOT NULL, 
	sm_clock_mhz INTEGER NOT NULL, 
	memory_clock_mhz INTEGER NOT NULL, 
	memory_bytes BIGINT NOT NULL, 
	power_limit_watts INTEGER NOT NULL, 
	CONSTRAINT pk_hadagen_environments PRIMARY KEY (id), 
	CONSTRAINT uq_hadagen_environments UNIQUE (gpu, compute_capability, sms, l2_bytes, driver, cuda, nvcc, sm_clock_mhz, memory_clock_mhz, memory_bytes, power_limit_watts)
);
INSERT INTO "hadagen_environments" VALUES(1,'NVIDIA H100 80GB HBM3','9.0',132,52428800,'580.65','13.0','13.0.48',1980,2619,0,0);
CREATE TABLE hadagen_errors (
	trial_id INTEGER NOT NULL, 
	input_class VARCHAR NOT NULL, 
	relative_error DOUBLE, 
	CONSTRAINT pk_hadagen_errors PRIMARY KEY (trial_id, input_class), 
	CONSTRAINT fk_hadagen_errors_trial_id FOREIGN KEY(trial_id) REFERENCES hadagen_trials (id)
);
INSERT INTO "hadagen_errors" VALUES(1,'normal',0.0002);
INSERT INTO "hadagen_errors" VALUES(1,'constant',0.0);
INSERT INTO "hadagen_errors" VALUES(3,'normal',0.0002);
INSERT INTO "hadagen_errors" VALUES(3,'constant',0.0);
CREATE TABLE hadagen_kernels (
	id INTEGER NOT NULL, 
	digest VARCHAR NOT NULL, 
	entry VARCHAR NOT NULL, 
	arch VARCHAR NOT NULL, 
	threads INTEGER NOT NULL, 
	cluster INTEGER NOT NULL, 
	shared_bytes INTEGER NOT NULL, 
	tile_elements BIGINT NOT NULL, 
	persistent BOOLEAN NOT NULL, 
	scale_form VARCHAR NOT NULL, 
	params VARCHAR NOT NULL, 
	starts_early BOOLEAN NOT NULL, 
	arithmetic VARCHAR NOT NULL, 
	registers INTEGER NOT NULL, 
	spill_bytes INTEGER NOT NULL, 
	static_shared_bytes INTEGER NOT NULL, 
	nvcc VARCHAR NOT NULL, 
	source TEXT NOT NULL, 
	ptx BLOB NOT NULL, 
	cubin BLOB NOT NULL, 
	seal VARCHAR NOT NULL, 
	CONSTRAINT pk_hadagen_kernels PRIMARY KEY (id), 
	CONSTRAINT uq_hadagen_kernels UNIQUE (digest)
);
INSERT INTO "hadagen_kernels" VALUES(1,'fb22ff27a9d0021c752a92beec3a380d25b24c36da2c5867361a19b2eddfff7e','k','sm90',256,1,0,4096,0,'fp32','const void* x, void* y, i64 elements, u32 scale_word',0,'',40,0,0,'13.0.48','// source',X'789CD3D7572828A950C84F53482E4DCACC533004002EAC0552',X'789C4B2E4DCACC533004000AC30263','3b5d69300345997aedef5c1e9750debc7dc0bbc020e863a43f6f427565c58718');
INSERT INTO "hadagen_kernels" VALUES(2,'0804d22ff683c56af8c15fe09d4c96de585bab3b3c458d3a7b5ac62ec66da3bd','k','sm90',256,1,0,4096,0,'fp32','const void* x, void* y, i64 elements, u32 scale_word, i64 columns, i64 x_pitch, i64 y_pitch',0,'',40,0,0,'13.0.48','// source',X'789CD3D7572828A950C84F53482E4DCACC533001002EAF0555',X'789C4B2E4DCACC533001000AC60266','962c8a9fc30307194c1900800f844daeb6856f2f5a244db86763d0fcd1ba70e1');
CREATE TABLE hadagen_problems (
	id INTEGER NOT NULL, 
	"key" VARCHAR NOT NULL, 
	CONSTRAINT pk_hadagen_problems PRIMARY KEY (id), 
	CONSTRAINT uq_hadagen_problems UNIQUE ("key")
);
INSERT INTO "hadagen_problems" VALUES(1,'n256-float16-accurate');
INSERT INTO "hadagen_problems" VALUES(2,'n256-float16-accurate-pitched');
CREATE TABLE hadagen_schema_version (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT hadagen_schema_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO "hadagen_schema_version" VALUES('0008');
CREATE TABLE hadagen_timings (
	trial_id INTEGER NOT NULL, 
	position INTEGER NOT NULL, 
	elements BIGINT NOT NULL, 
	destination VARCHAR NOT NULL, 
	cache VARCHAR NOT NULL, 
	us DOUBLE NOT NULL, 
	us_low DOUBLE NOT NULL, 
	us_high DOUBLE NOT NULL, 
	copy_us DOUBLE NOT NULL, 
	CONSTRAINT pk_hadagen_timings PRIMARY KEY (trial_id, position), 
	CONSTRAINT fk_hadagen_timings_trial_id FOREIGN KEY(trial_id) REFERENCES hadagen_trials (id)
);
INSERT INTO "hadagen_timings" VALUES(1,0,8192,'in-place','hot',2.0,1.98,2.02,1.9);
INSERT INTO "hadagen_timings" VALUES(1,1,8192,'in-place','cold',3.0,2.96999999999999975131e+00,3.03000000000000024868e+00,1.9);
INSERT INTO "hadagen_timings" VALUES(3,0,8192,'in-place','hot',2.0,1.98,2.02,1.9);
INSERT INTO "hadagen_timings" VALUES(3,1,8192,'in-place','cold',3.0,2.96999999999999975131e+00,3.03000000000000024868e+00,1.9);
CREATE TABLE hadagen_trials (
	id INTEGER NOT NULL, 
	problem_id INTEGER NOT NULL, 
	environment_id INTEGER NOT NULL, 
	kernel_id INTEGER, 
	arch VARCHAR NOT NULL, 
	knobs JSON NOT NULL, 
	knobs_key VARCHAR NOT NULL, 
	provenance VARCHAR NOT NULL, 
	outcome VARCHAR NOT NULL, 
	detail TEXT NOT NULL, 
	date VARCHAR NOT NULL, 
	seconds DOUBLE NOT NULL, 
	seal VARCHAR NOT NULL, 
	CONSTRAINT pk_hadagen_trials PRIMARY KEY (id), 
	CONSTRAINT uq_hadagen_trials UNIQUE (problem_id, arch, knobs_key, environment_id, provenance), 
	CONSTRAINT fk_hadagen_trials_problem_id FOREIGN KEY(problem_id) REFERENCES hadagen_problems (id), 
	CONSTRAINT fk_hadagen_trials_environment_id FOREIGN KEY(environment_id) REFERENCES hadagen_environments (id), 
	CONSTRAINT fk_hadagen_trials_kernel_id FOREIGN KEY(kernel_id) REFERENCES hadagen_kernels (id)
);
INSERT INTO "hadagen_trials" VALUES(1,1,1,1,'sm90','{"chunks": 1, "grid": "tiles"}','{"chunks":1,"grid":"tiles"}','measured','ok','','2025-01-02T03:04:05+00:00',0.25,'5a906f06261fccc8f74d90b5573e93708631e87d5f5b6f4e32c2eaf14fd18975');
INSERT INTO "hadagen_trials" VALUES(2,1,1,NULL,'sm90','{"chunks": 2, "grid": "tiles"}','{"chunks":2,"grid":"tiles"}','measured','compile_failed','no','2025-01-02T03:04:05+00:00',0.25,'6d10746b8157cb6157d783f5e8c277344729991c31591be46f7666929e88da06');
INSERT INTO "hadagen_trials" VALUES(3,2,1,2,'sm90','{"chunks": 4, "grid": "tiles"}','{"chunks":4,"grid":"tiles"}','measured','ok','','2025-01-02T03:04:05+00:00',0.25,'1e361a0d003c99217ffa9e55363099f7c10d2419c4b269b58a3c35cb618fc1ed');
CREATE INDEX ix_hadagen_trials_kernel_id ON hadagen_trials (kernel_id);
COMMIT;
